"""The one exception whose text is meant for users."""


class UserError(ValueError):
    """Something the user can mend: its text is one whole translated sentence, shown as it is.

    `field` is the dotted path of the scenario's field at fault, such as ``hardware.gpus``, or empty.
    """

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field
