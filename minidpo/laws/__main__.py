"""`python -m minidpo.laws --loss mine:loss`: pytest with these laws, wherever minidpo can be imported."""

import os
import sys

from minidpo.laws import missing

if __name__ == "__main__":
    if lacking := missing("pytest"):
        print(lacking, file=sys.stderr)
        sys.exit(2)
    import pytest

    # pytest's settings in the folder where it is called, or above, are of other tests
    os.environ.pop("PYTEST_ADDOPTS", None)
    ours = f"-q -c {os.devnull} --rootdir . --noconftest -p no:cacheprovider".split()
    ours += ["-p", "minidpo.laws.plugin", "--pyargs", "minidpo.laws"]
    sys.exit(pytest.main(ours + sys.argv[1:]))
