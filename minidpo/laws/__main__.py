"""`python -m minidpo.laws --loss mine:loss`: pytest with these laws, wherever minidpo can be imported."""

import sys

import pytest

if __name__ == "__main__":
    ours = "-q -p no:cacheprovider -p minidpo.laws.plugin --pyargs minidpo.laws".split()
    sys.exit(pytest.main(ours + sys.argv[1:]))
