"""The page at ``/``: one file with its style and script inside, which loads nothing else."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources

from aiohttp import web

PAGE = (resources.files("mlxcel.server") / "static" / "status.html").read_text(encoding="utf-8")


def _hashes(element: str) -> str:
    """What a policy calls the inline elements of this kind: by their content's hash."""
    found = re.findall(rf"<{element}>(.*?)</{element}>", PAGE, re.DOTALL)
    digests = (hashlib.sha256(text.encode()).digest() for text in found)
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)


POLICY = "; ".join(
    (
        "default-src 'none'",
        f"script-src {_hashes('script')}",
        f"style-src {_hashes('style')}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    )
)
"""The page may run its own script, fetch from its own server, and nothing else."""

HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


async def page(request: web.Request) -> web.Response:
    """The page itself, which knows nothing: its script asks for what it shows."""
    return web.Response(text=PAGE, content_type="text/html", headers=HEADERS)
