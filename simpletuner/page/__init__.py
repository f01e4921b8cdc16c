"""`simpletuner page`: settings, exports, caches and runs in a browser. HTML is made here, on the server."""
