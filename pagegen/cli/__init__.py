"""The command line: one module a command, loaded when called."""
