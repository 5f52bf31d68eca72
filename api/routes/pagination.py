"""Pages of lists: the parameters `limit` and `cursor`, and the page that answers them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar

from fastapi import Depends, Query
from pydantic import BaseModel, ConfigDict

Item = TypeVar("Item")

MOST_OF_A_PAGE = 200


class Page(BaseModel, Generic[Item]):
    """A part of a list, and the cursor of the next one."""

    model_config = ConfigDict(frozen=True)

    items: list[Item]
    next: str | None  # pass it as cursor; null on the last page


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a list that `limit` and `cursor` select."""

    limit: int
    before: int | None  # number of the last item on the page before; None: start at the newest

    @property
    def rows(self) -> int:
        """Return the number of rows to read: one more than the page shows, to know if more follow."""
        return self.limit + 1

    def page(self, found: Sequence[Any], view: Callable[[Any], Item]) -> Page[Item]:
        """Return the page of up to `rows` rows, which are ordered by their numbers."""
        shown = found[: self.limit]
        following = str(shown[-1].number) if len(found) > self.limit else None
        return Page(items=[view(row) for row in shown], next=following)


async def _piece(  # not a plain function: FastAPI would call it in a thread
    limit: Annotated[int, Query(ge=1, le=MOST_OF_A_PAGE, description="Maximum number of items.")] = 50,
    cursor: Annotated[
        str | None, Query(pattern="^[0-9]{1,18}$", description="`next` of the page before.")
    ] = None,
) -> Piece:
    return Piece(limit, None if cursor is None else int(cursor))


PieceOf = Annotated[Piece, Depends(_piece)]
"""The parameter of a route that returns a list."""
