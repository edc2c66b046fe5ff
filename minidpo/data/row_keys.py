"""Row keys: what a row of another trainer's file, or a message in it, says beside its text.

A key is read, or it is a note about the text such as its source or score, or it is refused: what nobody here
understands may say how the text is to be learned, or that it is not.
"""

import re

# These say whether to learn a message: true or 1, false or 0. `masked` says the opposite.
LEARN_KEYS = (
    "learn",
    "loss",
    "loss_mask",
    "loss_weight",
    "masked",
    "train",
    "trainable",
    "training",
    "weight",
)
# Notes change nothing in what is learned. A note's key is one of these, or ends with one as its last word,
# as in prompt_id, chosen-model, createdAt and, once its side is taken away, score_chosen.
NOTES = """
    author annotator annotators header ip judge model models name names policies policy username
    fingerprint hash id idx index key sha unnamed uuid version
    at country date duration latency time timestamp year
    complexity cost count difficulty length level quality rank ranks rating ratings score scores tokens usage
    dataset file filename licence license origin path provenance repo source sources split subset url urls
    categories category constraints domain intent lang language languages style subject topic topics type
    comment comments meta metadata moderation note notes redacted tag tags task title
    annotated_by created_by finish_reason generated_by n_turns num_turns seed stop_reason temperature turn
    all_generated_responses new_generations original_response raw_generation_responses
"""
NOTE_WORDS = frozenset(NOTES.split())
SIDES = {"chosen", "rejected", "a", "b"}
# A key with a word that begins so is never a note: what it says may steer the learning (loss_type,
# train_on_turn, deleted_at), or be content that is not text (image_url).
NO_NOTE = re.compile(
    "attach|audio|delet|discard|drop|exclu|filter|ignor|image|invalid|learn|loss|margin|mask|remov|screenshot"
    "|skip|train|video|weight"
)


def says_nothing(value: object) -> bool:
    """Whether a value is null or empty, or holds only such, also as JSON in a text: `datasets` writes so, to
    have one type in each row.

    >>> [says_nothing(value) for value in (None, " ", "[ ]", {"name": None}, 0, False, [0])]
    [True, True, True, True, False, False, False]
    """
    if isinstance(value, str):
        return "".join(value.split()) in ("", "null", "[]", "{}")
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return all(item in (None, "", [], {}) for item in value)
    return value is None


def is_note(key: str) -> bool:
    """Whether a key is a note about the text.

    >>> [is_note(key) for key in ("prompt_id", "createdAt", "score_chosen", "loss_type", "system", "input_ids")]
    [True, True, True, False, False, False]
    """
    words = [word.lower() for word in re.findall("[A-Z]*[a-z]+|[A-Z]+", key)]
    if any(map(NO_NOTE.match, words)):
        return False
    words = [word for word in words if word not in SIDES]
    return bool(words) and (words[-1] in NOTE_WORDS or "_".join(words) in NOTE_WORDS)


def refuse_unread(said: dict, read: set[str], where: str) -> None:
    """Raises ValueError naming the first key that says something and is neither read nor a note."""
    for key, value in said.items():
        if key not in read and not says_nothing(value) and not is_note(key):
            raise ValueError(
                f"{where}: {key!r} is not read, and might change what is learned: say it in the messages "
                "where that is meant, and leave the key out of the file"
            )


def learn_flags(said: dict, where: str) -> dict[str, bool]:
    """Whether a message, or row, is to be learned, by each key that says so. Raises ValueError if one says
    neither yes nor no."""
    found = {}
    for key in LEARN_KEYS:
        value = said.get(key)
        if says_nothing(value):
            continue
        if value not in (True, False):  # 1 and 0 are equal to these
            raise ValueError(
                f"{where}: {key!r} should be true or false, since what is learned counts alike, got "
                f"{value!r:.40}: leave it out of the file"
            )
        found[key] = bool(value) != (key == "masked")
    return found
