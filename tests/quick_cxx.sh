#!/bin/sh
# c++ almost without its optimiser: see _compiler in conftest.py.
exec c++ "$@" -Og
