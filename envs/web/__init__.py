"""Any page of the web as an environment without a verdict. Such a page is not trusted.

Read in this order: `gate` (what the page may reach, and a proxy that lets nothing else through), `visit` (the page as
an environment, with visit.js in its tab). The code that reads and acts is that of `miniwob/browser`.
"""
