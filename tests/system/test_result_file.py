"""result.json: agents have a key of their own, and files of version 1 are read in the same shape."""

import json

import pytest

from minidpo.system.result_file import read_result, write_result

RATES = {"all": {"success": 0.5}, "tasks": {"click-link": {"success": 0.5}}}


@pytest.mark.parametrize("version", [{}, {"version": 1}])
def test_agents_at_the_top_level_are_moved_under_their_key(tmp_path, version):
    fields = {"comparison": {"n": 1}, "seconds": {"sft": 1.5}, "best_of": 1}
    (tmp_path / "result.json").write_text(
        json.dumps({**version, "sft": RATES, "dpo": RATES, **fields})
    )
    assert read_result(tmp_path / "result.json") == {
        "agents": {"sft": RATES, "dpo": RATES},
        **fields,
    }


def test_an_agent_called_like_a_field_comes_back_beside_the_field(tmp_path):
    result = {"agents": {"comparison": RATES, "agents": RATES}, "comparison": {"n": 1}}
    write_result(tmp_path / "result.json", result)
    assert read_result(tmp_path / "result.json") == result


def test_a_round_of_a_loop_has_a_result_without_agents(tmp_path):
    write_result(tmp_path / "result.json", {"round": 1, "tasks": {"click-link": 0.5}})
    assert read_result(tmp_path / "result.json") == {
        "agents": {},
        "round": 1,
        "tasks": {"click-link": 0.5},
    }


def test_an_unknown_version_is_refused(tmp_path):
    (tmp_path / "result.json").write_text('{"version": 3}')
    with pytest.raises(
        ValueError, match="a result of format version 3, but this minidpo reads version 2"
    ):
        read_result(tmp_path / "result.json")
