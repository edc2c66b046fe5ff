"""The study of docs/results.md: run.py plays and records the rows of grid.py, document.py writes the page."""
