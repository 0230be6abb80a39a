"""`python -m pagegen`: the command line without the installed script."""

from pagegen.cli.main import main

main(prog_name="pagegen")
