"""Pages of lists: the parameters `limit` and `cursor`, and the page that answers them."""

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
    """A part of a list, and the cursor of the next one."""

    model_config = ConfigDict(frozen=True)

    items: list[Item]
    next: str | None  # pass it as cursor; null on the last page


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a list that `limit` and `cursor` select."""

    limit: int
    after: str | None  # sort key of the last item on the page before; None: start at the beginning

    @property
    def before(self) -> int | None:
        """Return `after` as a number, for a list in descending order.

        Raises:
            MalformedRequest: the cursor is not one of this list.
        """
        if self.after is not None and not re.fullmatch("[0-9]{1,18}", self.after):
            raise MalformedRequest([FOREIGN])
        return None if self.after is None else int(self.after)

    @property
    def rows(self) -> int:
        """Return the number of rows to read: one more than the page shows, to know if more follow."""
        return self.limit + 1

    def page(
        self,
        found: Sequence[Row],
        view: Callable[[Row], Item],
        sort_key: Callable[[Row], object] = attrgetter("number"),
    ) -> Page[Item]:
        """Return the page of up to `rows` rows; `sort_key` is what orders the list."""
        shown = found[: self.limit]
        following = _cursor(sort_key(shown[-1])) if len(found) > self.limit else None
        return Page(items=[view(row) for row in shown], next=following)


async def _piece(  # not a plain function: FastAPI would call it in a thread
    limit: Annotated[int, Query(ge=1, le=MOST_OF_A_PAGE, description="Maximum number of items.")] = 50,
    cursor: Annotated[str | None, Query(max_length=400, description="`next` of the page before.")] = None,
) -> Piece:
    return Piece(limit, None if cursor is None else _sort_key(cursor))


PieceOf = Annotated[Piece, Depends(_piece)]
"""The parameter of a route that returns a list."""


def _cursor(sort_key: object) -> str:
    return base64.urlsafe_b64encode(str(sort_key).encode()).decode().rstrip("=")


def _sort_key(cursor: str) -> str:
    """Return the sort key in a cursor.

    Raises:
        MalformedRequest: the cursor is not one of this service.
    """
    padded = cursor + "=" * (-len(cursor) % 4)
    try:
        sort_key = base64.b64decode(padded, altchars=b"-_", validate=True).decode("ascii")
    except ValueError:
        raise MalformedRequest([FOREIGN]) from None
    if "\0" in sort_key:  # PostgreSQL does not store it
        raise MalformedRequest([FOREIGN])
    return sort_key
