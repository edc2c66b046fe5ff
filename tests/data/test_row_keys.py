"""What a row says beside its text is a note, or it is heard, or it is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidpo.data.row_keys import NOTE_WORDS, is_note, learn_flags, refuse_unread, says_nothing

PUBLIC = """
    prompt_id score_chosen score_rejected source chosen-rating rejected-model chosen_avg_rating id
    num_turns original_response category task_category conversation_id model turn language redacted
    openai_moderation created_at createdAt promptId timestamp uuid chosen_policy difficulty quality
    reward_model_score conversation_tokens message_tree_id model_name original_dataset constraints
    all_generated_responses all_rm_scores tool_call_id name finish_reason metadata __index_level_0__
    distilabel_metadata model_a score_1 URL
"""
STEERING = """
    margin mask masked_by loss_type train_on_turn training_id weights weight_score label labels
    input_ids ref_chosen_logps chat_template_kwargs tools tool_calls images system instruction
    conversations text question answer response thinking prefix deleted_at success status reward
    ignore_source image_url screenshot_path chosen a é 0
"""


@pytest.mark.parametrize("key", [*PUBLIC.split(), "Unnamed: 0"])
def test_the_columns_of_public_datasets_are_notes(key):
    assert is_note(key)


@pytest.mark.parametrize("key", ["", *STEERING.split()])
def test_what_may_change_what_is_learned_is_no_note_and_is_refused_by_its_name(key):
    assert not is_note(key)
    with pytest.raises(ValueError, match="x, line 3") as caught:
        refuse_unread({"id": 7, key: False}, {"role"}, "x, line 3")
    assert repr(key) in str(caught.value) and "\n" not in str(caught.value)
    for nothing in (None, "", [], "[]", "null", {}, [None], {"name": None}):
        refuse_unread({key: nothing}, set(), "x")


@given(
    st.sampled_from(["loss", "train", "weight", "mask", "margin", "image"]),
    st.sampled_from(sorted(NOTE_WORDS)),
)
def test_no_word_makes_a_note_of_a_key_about_learning_or_pictures(word, note):
    assert not is_note(f"{word}_{note}") and not is_note(f"{note}_{word}")


leaves = st.booleans() | st.integers() | st.text().map("a".__add__)


@given(
    st.recursive(
        leaves,
        lambda inner: st.lists(inner, min_size=1) | st.dictionaries(st.text(), inner, min_size=1),
    )
)
def test_a_number_a_word_or_false_says_something(value):
    assert not says_nothing(value)


def test_a_flag_that_says_neither_yes_nor_no_is_refused_and_masked_is_the_opposite():
    assert learn_flags({"train": 1, "weight": 0.0, "masked": False, "loss": None}, "") == {
        "train": True,
        "weight": False,
        "masked": True,
    }
    for value in (0.5, 2, "false", [0, 1], {"a": 1}):
        with pytest.raises(ValueError, match="line 2.*'loss_mask'"):
            learn_flags({"loss_mask": value}, "x, line 2")
