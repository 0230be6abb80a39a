-- Roles of a tuning database that a fleet shares. Run it as the owner of the tables, in their database, once they are
-- there (`pagegen db migrate --db URL` makes them), and again after an upgrade; it may be repeated:
--
--     pagegen db roles | psql URL
--
-- The two roles are groups. A person or machine logs in with a role of its own that is a member of one:
--
--     CREATE ROLE serving LOGIN PASSWORD '...' IN ROLE pagegen_reader;
--     CREATE ROLE tuning LOGIN PASSWORD '...' IN ROLE pagegen_writer;
--
-- A reader reads. A writer reads and adds: of what was measured it changes and removes nothing, so that no tuner can undo
-- what another did. Leases, which say who measures what just now, it takes and gives back. Tables are made, upgraded and
-- pruned by their owner alone.

DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'pagegen_reader') THEN
        CREATE ROLE pagegen_reader NOLOGIN;
    END IF;
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'pagegen_writer') THEN
        CREATE ROLE pagegen_writer NOLOGIN;
    END IF;
    -- by default everybody may connect and make temporary tables
    EXECUTE format('REVOKE ALL ON DATABASE %I FROM PUBLIC', current_database());
    EXECUTE format('GRANT CONNECT ON DATABASE %I TO pagegen_reader, pagegen_writer', current_database());
END
$$;

-- before PostgreSQL 15 everybody may make tables here
REVOKE ALL ON SCHEMA public FROM PUBLIC;
GRANT USAGE ON SCHEMA public TO pagegen_reader, pagegen_writer;

-- what an earlier version of this file granted
REVOKE ALL ON ALL TABLES IN SCHEMA public FROM PUBLIC, pagegen_reader, pagegen_writer;
REVOKE ALL ON ALL SEQUENCES IN SCHEMA public FROM PUBLIC, pagegen_reader, pagegen_writer;

GRANT SELECT ON ALL TABLES IN SCHEMA public TO pagegen_reader, pagegen_writer;
GRANT INSERT ON
    compile_facts, devices, environments, extras, kernels, portfolios, predictions, profiles, trials, variants, workloads
    TO pagegen_writer;
GRANT INSERT, UPDATE, DELETE ON leases TO pagegen_writer;
GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO pagegen_writer;
