"""Lists in pages: how much of a list was asked for, from where on, and the page that answers it."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, Generic, TypeVar

from fastapi import Depends, Query
from pydantic import BaseModel, ConfigDict

from autoac.api.errors import MalformedRequest

Row = TypeVar("Row")
Item = TypeVar("Item")

MOST_OF_A_PAGE = 200
FOREIGN = "query.cursor: not a cursor of this service"


class Page(BaseModel, Generic[Item]):
    """A piece of a list, and how to get the next."""

    model_config = ConfigDict(frozen=True)

    items: list[Item]
    next: str | None  # pass it as cursor; null on the last page


@dataclass(frozen=True, slots=True)
class Piece:
    """What `limit` and `cursor` of a request ask for."""

    limit: int
    after: str | None  # the place of the last item of the page before; None: from the beginning

    @property
    def before(self) -> int | None:
        """`after` of a list that goes down by number.

        Raises:
            MalformedRequest: it is no number, so the cursor is none of ours.
        """
        if self.after is not None and not re.fullmatch("[0-9]{1,18}", self.after):
            raise MalformedRequest([FOREIGN])
        return None if self.after is None else int(self.after)

    @property
    def rows(self) -> int:
        """How many rows to look for: one more than the page has, which tells whether more follow."""
        return self.limit + 1

    def page(
        self,
        found: Sequence[Row],
        view: Callable[[Row], Item],
        place: Callable[[Row], object] = attrgetter("number"),
    ) -> Page[Item]:
        """The page, from up to `rows` rows; `place` is what the list is ordered by."""
        kept = found[: self.limit]
        following = _cursor(place(kept[-1])) if len(found) > self.limit else None
        return Page(items=[view(row) for row in kept], next=following)


async def _piece(  # not a plain function: FastAPI calls those in a thread
    limit: Annotated[int, Query(ge=1, le=MOST_OF_A_PAGE, description="Most items of a page.")] = 50,
    cursor: Annotated[str | None, Query(max_length=400, description="`next` of the page before.")] = None,
) -> Piece:
    return Piece(limit, None if cursor is None else _place(cursor))


PieceOf = Annotated[Piece, Depends(_piece)]
"""The parameter of a route that gives a list."""


def _cursor(place: object) -> str:
    return base64.urlsafe_b64encode(str(place).encode()).decode().rstrip("=")


def _place(cursor: str) -> str:
    """Raises: MalformedRequest: it is none of ours, or has a NUL in it, which PostgreSQL does not take."""
    padded = cursor + "=" * (-len(cursor) % 4)
    try:
        place = base64.b64decode(padded, altchars=b"-_", validate=True).decode("ascii")
    except ValueError:
        raise MalformedRequest([FOREIGN]) from None
    if "\0" in place:
        raise MalformedRequest([FOREIGN])
    return place
