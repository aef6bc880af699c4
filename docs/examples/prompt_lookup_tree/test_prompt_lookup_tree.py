"""The method keeps the contract between drafters and hosts."""

# --8<-- [start:test]
import pytest
from prompt_lookup_tree import METHOD

from drafttree.testing import check_method


@pytest.mark.parametrize("options", [{}, {"width": 1}, {"width": 3, "length": 2}])
def test_the_method_keeps_the_contract(options):
    assert check_method(METHOD, options) > 0


# --8<-- [end:test]
