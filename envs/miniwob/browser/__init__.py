"""MiniWoB++'s pages in Chromium: what a person sees as text, actions as real mouse and keyboard input.

Read in this order: `chromium` (the program), tab.js, episode.js, sight.js and page.js (the scripts in a page
that read it), `page` (one tab), `driver` (the browser's life, and episodes that survive its death). `remote`
runs all of it in another process, `shared` runs it in a thread for code without `await`.
"""
