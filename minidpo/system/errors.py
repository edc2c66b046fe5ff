"""What an error says, in one line."""


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type if it has none.

    >>> first_line(ValueError("no space left\\nat line 3")), first_line(TimeoutError())
    ('no space left', 'TimeoutError()')
    """
    return (str(error).strip() or repr(error)).splitlines()[0]
