"""The studies: run.py plays the rows of grid.py, document.py writes docs/results.md;
learners.py and credit.py make docs/learners.md.
"""
