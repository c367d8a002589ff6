"""What a message that was sent again says of the dead letter that it was made of."""

from __future__ import annotations

from typing import Final

#: The offset id of that letter.
RESENT_FROM: Final = "DLQ_RESENT_FROM"
#: How often it has been sent again, with this time.
RESENT_TIMES: Final = "DLQ_RESENT_TIMES"
