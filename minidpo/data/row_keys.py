"""Row keys: which keys of a row, or of a message in it, we may ignore in another trainer's file.

A key is read, or it is a note about the text (its source, its score), or it is refused: a key that we do not
know might say how to learn the text, or not to learn it.
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
# Notes do not change what is learned. A note's key is one of these or has one as its last word: prompt_id,
# chosen-model, createdAt. "chosen" and "rejected" are removed first, so score_chosen is a note, too.
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
# A key with a word that begins so is never a note: it may steer the learning (loss_type, train_on_turn,
# deleted_at) or be content that is not text (image_url).
NO_NOTE = re.compile(
    "attach|audio|delet|discard|drop|exclu|filter|ignor|image|invalid|kto|learn|loss|margin|mask|remov|screenshot"
    "|skip|train|video|weight"
)


def says_nothing(value: object) -> bool:
    """Whether a value is null or empty, or holds only such values, also if it is JSON in a text. The `datasets`
    library writes such values to give every row the same types.

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
    """For each key that says whether to learn this message or row, what it says. Raises ValueError if a value is
    neither true nor false."""
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
