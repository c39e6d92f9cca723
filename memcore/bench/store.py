"""What was measured, kept in a file: SQLite through SQLAlchemy Core.

Each call opens the file and lets go of it, so that a server's threads and a command line can share it. What is
wrong with the file is a UserError of one sentence; a measurement that could not be kept is only not kept.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import (
    Column,
    Connection,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    create_engine,
    event,
    insert,
    inspect,
    select,
)  # fmt: skip
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.pool import NullPool

from memcore.bench.case import Case
from memcore.bench.measurement import DeviceFacts, Measurement, dump_measurement, load_measurement
from memcore.errors import UserError
from memcore.i18n import gettext as _

# How long a call waits for another program that writes to the file.
LOCK_S = 5.0
FORMAT = "memcore_measurements_1"
# An export holds as much as the store does; this is far more than a team measures in years.
MAX_EXPORT_CHARS = 200_000_000

_TABLES = MetaData()
_MEASUREMENTS = Table(
    "measurements",
    _TABLES,
    Column("id", Integer, primary_key=True),
    Column("measured_at", String(40), nullable=False),
    Column("device", String(200), nullable=False),
    Column("driver", String(200), nullable=False),
    Column("torch", String(40), nullable=False),
    Column("case_key", String(64), nullable=False, index=True),
    Column("measurement", Text, nullable=False),
)


class Store:
    """The measurements of one file. Nothing is made before the first is kept."""

    def __init__(self, path: Path, *, lock_s: float = LOCK_S) -> None:
        self._path = path
        self._engine = create_engine(
            f"sqlite:///{path}", poolclass=NullPool, connect_args={"timeout": lock_s, "isolation_level": None}
        )
        event.listen(self._engine, "begin", _begin)

    def add(self, measurements: Sequence[Measurement]) -> None:
        """Keep measurements. Raises UserError where the file cannot be written."""
        if measurements:
            with self._connection(write=True) as connection:
                connection.execute(insert(_MEASUREMENTS), [_row(each) for each in measurements])

    def by_device(self, cases: Sequence[Case]) -> dict[DeviceFacts, dict[str, Measurement]]:
        """For each device that has measured one of the cases the newest measurement of each, by the case's key. The
        device whose last measurement is the newest comes first."""
        found: dict[DeviceFacts, dict[str, Measurement]] = {}
        for text in self._texts(_MEASUREMENTS.c.case_key.in_([case.key for case in cases])):
            measurement = self._read(text)
            # Taken out and put in again: so the order is that of the last measurements.
            others = found.pop(measurement.device, {})
            found[measurement.device] = {**others, measurement.case.key: measurement}
        return dict(reversed(found.items()))

    def everything(self) -> list[Measurement]:
        """All measurements, oldest first."""
        return [self._read(text) for text in self._texts(None)]

    def export(self) -> dict[str, Any]:
        """All measurements as JSON data."""
        return {"format": FORMAT, "measurements": [dump_measurement(each) for each in self.everything()]}

    def take_in(self, data: object) -> int:
        """Keep what another store exported, but for what is here already; how many that were.

        Raises UserError for other data.
        """
        if not isinstance(data, Mapping) or data.get("format") != FORMAT:
            raise UserError(_("This is no export of measurements: it does not say {format!r}.").format(format=FORMAT))
        try:
            given = [load_measurement(each) for each in data["measurements"]]
        except (KeyError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())[:100]
            raise UserError(_("The export of measurements cannot be read ({reason}).").format(reason=reason)) from None
        known = {json.dumps(dump_measurement(each), sort_keys=True) for each in self.everything()}
        new = [each for each in given if json.dumps(dump_measurement(each), sort_keys=True) not in known]
        self.add(new)
        return len(new)

    def _texts(self, condition: Any) -> list[str]:
        if not self._path.exists():
            return []
        query = select(_MEASUREMENTS.c.measurement).order_by(_MEASUREMENTS.c.measured_at, _MEASUREMENTS.c.id)
        with self._connection() as connection:
            if not inspect(connection).has_table(_MEASUREMENTS.name):
                return []
            return list(connection.scalars(query if condition is None else query.where(condition)))

    def _read(self, text: str) -> Measurement:
        try:
            return load_measurement(json.loads(text))
        except ValueError:
            raise self._unreadable(_("a measurement in it is of another form")) from None

    @contextmanager
    def _connection(self, *, write: bool = False) -> Iterator[Connection]:
        """A connection whose work is kept whole or not at all."""
        try:
            if write:
                self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._engine.execution_options(writes=write).begin() as connection:
                if write:
                    _TABLES.create_all(connection)
                yield connection
        except OperationalError as error:
            if "locked" in str(error.orig) or "busy" in str(error.orig):
                sentence = _("The file of measurements {path} is in use by another program; try again in a moment.")
                raise UserError(sentence.format(path=self._path.name)) from None
            raise self._unreadable(str(error.orig)) from None
        except DBAPIError as error:
            raise self._unreadable(str(error.orig)) from None
        except OSError as error:
            raise self._unreadable(error.strerror or str(error)) from None

    def _unreadable(self, reason: str) -> UserError:
        sentence = _("The file of measurements {path} cannot be used ({reason}); move it away to begin a new one.")
        return UserError(sentence.format(path=self._path.name, reason=reason[:100]))


def _begin(connection: Connection) -> None:
    """Who will write takes the lock at once, and so waits for it: one who has read already would be refused."""
    writes = connection.get_execution_options().get("writes")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _row(measurement: Measurement) -> dict[str, Any]:
    device = measurement.device
    return {
        "measured_at": measurement.measured_at,
        "device": device.name,
        "driver": device.driver,
        "torch": device.torch,
        "case_key": measurement.case.key,
        "measurement": json.dumps(dump_measurement(measurement), separators=(",", ":")),
    }
