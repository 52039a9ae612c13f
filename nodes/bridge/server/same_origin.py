"""Same-origin check: this pack's routes accept requests from ComfyUI's own page, not from pages of other sites.

ComfyUI compares Origin and Host only if it is reached by a loopback address. A browser lets any page send text/plain or
a form anywhere, but application/json to another origin only with the server's consent, which this one does not give.
Other programs, which send neither header, are accepted, as by ComfyUI.
"""

import functools
from urllib.parse import urlsplit

from aiohttp import web


def add_checked(routes, own):
    """Add the routes of the RouteTableDef `own` to ComfyUI's, with these checks. Other sites' pages get status 403, a
    POST without a body of application/json gets 415."""
    for route in own:
        routes.route(route.method, route.path)(_checked(route.handler))


def _checked(handler):
    @functools.wraps(handler)
    async def answer(request):
        if not is_same_origin(request.headers):
            return _refuse("Open ComfyUI's own page: this request is from a page of another site. Configure a reverse "
                           "proxy to pass on the Host header.", 403)
        if request.method == "POST" and request.content_type != "application/json":
            return _refuse(f"Send Content-Type: application/json instead of {request.content_type}.", 415)
        return await handler(request)
    return answer


def is_same_origin(headers):
    """Whether a request is from a page of this server, from the address bar, or from no browser.

    Sec-Fetch-Site is decisive if the browser sends it, as over HTTPS: no page can set it, and a reverse proxy may
    change Host. Otherwise Origin must match Host.
    """
    site = headers.get("Sec-Fetch-Site")
    if site is not None:
        return site in ("same-origin", "none")
    origin = headers.get("Origin")
    return origin is None or urlsplit(origin).netloc.lower() == headers.get("Host", "").lower()


def _refuse(text, status):
    return web.json_response({"error": text}, status=status)
