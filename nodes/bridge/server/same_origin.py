"""Requests to this pack's routes are taken from ComfyUI's own page, and not from pages of other sites.

ComfyUI compares Origin and Host only where it is reached by a loopback address. A browser lets every page send
text/plain or a form anywhere, but application/json to another origin only after the server has agreed, which this one
does not. Programs, which send neither header, are let in as by ComfyUI.
"""

import functools
from urllib.parse import urlsplit

from aiohttp import web


def add_checked(routes, own):
    """Add the routes of the RouteTableDef `own` to ComfyUI's, each with these checks. They answer with 403 to another
    site's page, and with 415 to a POST without a body of application/json."""
    for route in own:
        routes.route(route.method, route.path)(_checked(route.handler))


def _checked(handler):
    @functools.wraps(handler)
    async def answer(request):
        if not is_same_origin(request.headers):
            return _refuse("Open ComfyUI's own page: this request comes from a page of another site. Behind a reverse "
                           "proxy, have it pass the Host header on.", 403)
        if request.method == "POST" and request.content_type != "application/json":
            return _refuse(f"Send Content-Type: application/json: {request.content_type} was given.", 415)
        return await handler(request)
    return answer


def is_same_origin(headers):
    """Does a request come from a page of this server, from the address bar, or from no browser?

    Sec-Fetch-Site decides where a browser sends it, as over HTTPS: no page can set it, and a reverse proxy may change
    Host. Elsewhere Origin has to name the Host.
    """
    site = headers.get("Sec-Fetch-Site")
    if site is not None:
        return site in ("same-origin", "none")
    origin = headers.get("Origin")
    return origin is None or urlsplit(origin).netloc.lower() == headers.get("Host", "").lower()


def _refuse(words, status):
    return web.json_response({"error": words}, status=status)
