"""Where pagegen meets other projects: one module a host library, loaded only when imported."""
