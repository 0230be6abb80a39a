"""`page_client.py SOCKET KIND ARGUMENTS...`: has the page server run a command with this process's streams."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(sys.argv[1])
    request = {"kind": sys.argv[2], "argv": sys.argv[3:], "cwd": str(Path.cwd()), "environment": dict(os.environ)}
    socket.send_fds(connection, [json.dumps(request).encode()], [0, 1, 2])
    status = connection.recv(16)
sys.exit(int(status or b"1"))
