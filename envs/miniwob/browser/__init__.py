"""MiniWoB++'s pages in Chromium: what a person sees as text, actions as real mouse and keyboard input.

Read in this order: `chromium` (the program), tab.js, episode.js, sight.js and page.js (the scripts that read a page
from inside), `page` (one tab), `driver` (starts the browser, and repeats episodes after it died). `remote` runs all of
it in another process, `shared` in a thread for code without `await`.
"""
