"""MLflow: a SQLite store inside the run's folder, or the store that MLFLOW_TRACKING_URI names."""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcrl.observe.record.trackers import Row, Status, TrackedRun
from hpcrl.sandbox.foreign_files import writable

FOLDER = "mlflow"
DATABASE = "mlflow.db"
ID_TAG = "hpcrl.run_id"
STATUS_TAG = "hpcrl.status"
STATUSES: dict[Status, str] = {"finished": "FINISHED", "failed": "FAILED", "requeued": "SCHEDULED"}
METRICS_PER_REQUEST = 1000  # these three are limits of MLflow
PARAMETERS_PER_REQUEST = 100
CHARACTERS_PER_PARAMETER = 6000


class MlflowTracker:
    """The MLflow run that has the training run's id as a tag.

    MLflow can neither remove nor replace the metrics of a step. A run that has steps or parameters which are not those
    of the training run any more is marked as deleted, and a new one is made with the whole history.
    """

    def __init__(self, run: TrackedRun) -> None:
        self._tracked = run
        self._client: Any = None
        self._run_id = ""

    def open(self, history: Sequence[Row]) -> int:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # usage reports to its developers
        from mlflow.entities import Param, ViewType
        from mlflow.tracking import MlflowClient

        uri, local = os.environ.get("MLFLOW_TRACKING_URI"), None
        if not uri:
            local = self._tracked.folder / FOLDER
            uri = _local_store(local)
        self._client = MlflowClient(tracking_uri=uri)
        experiment = self._experiment(local)
        parameters = {_name(key): _text(value) for key, value in self._tracked.parameters.items()}
        runs = self._client.search_runs(
            [experiment],
            filter_string=f"tags.`{ID_TAG}` = '{self._tracked.id}'",
            run_view_type=ViewType.ACTIVE_ONLY,
            order_by=["attributes.start_time DESC"],
        )
        last = _last_step(runs[0], history) if len(runs) == 1 and runs[0].data.params == parameters else None
        if last is not None:
            self._run_id = runs[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
            return last
        for run in runs:
            self._client.delete_run(run.info.run_id)
        tags = {ID_TAG: self._tracked.id, "mlflow.source.name": writable(str(self._tracked.folder))}
        created = self._client.create_run(experiment, tags=tags, run_name=self._tracked.name)
        self._run_id = created.info.run_id
        params = [Param(key, value) for key, value in parameters.items()]
        for start in range(0, len(params), PARAMETERS_PER_REQUEST):
            self._client.log_batch(self._run_id, params=params[start : start + PARAMETERS_PER_REQUEST])
        return -1

    def log(self, rows: Sequence[Row]) -> None:
        from mlflow.entities import Metric

        now = time.time_ns() // 10**6
        values = ((name, value, row.step) for row in rows for name, value in row.metrics.items())
        metrics = [Metric(_name(name), float(value), now, step) for name, value, step in values]
        for start in range(0, len(metrics), METRICS_PER_REQUEST):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + METRICS_PER_REQUEST])

    def finish(self, status: Status) -> None:
        self._client.set_tag(self._run_id, STATUS_TAG, status)
        if status == "requeued":
            self._client.update_run(self._run_id, status=STATUSES[status])
        else:
            self._client.set_terminated(self._run_id, status=STATUSES[status])

    def _experiment(self, folder: Path | None) -> str:
        """The id of the project's experiment, which is made if it does not exist; artifacts go to `folder`."""
        name = self._tracked.project
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            try:
                location = None if folder is None else (folder / "artifacts").as_uri()
                return str(self._client.create_experiment(name, artifact_location=location))
            except Exception:
                experiment = self._client.get_experiment_by_name(name)  # another run may have made it meanwhile
                if experiment is None:
                    raise
        return str(experiment.experiment_id)


def _local_store(folder: Path) -> str:
    """The URI of the store in `folder`, made under another name first: one that is half made cannot be opened."""
    from mlflow.tracking import MlflowClient

    folder.mkdir(exist_ok=True)
    database, draft = folder / DATABASE, folder / f"{DATABASE}.new"
    if not database.exists():
        draft.unlink(missing_ok=True)
        MlflowClient(tracking_uri=f"sqlite:///{draft}")
        os.replace(draft, database)
    return f"sqlite:///{database}"


def _last_step(run: Any, history: Sequence[Row]) -> int | None:
    """The last step of an MLflow run, or None if its values are not those of this step in `history`.

    Two attempts at a step differ in their times, if in nothing else.
    """
    latest = run.data.to_proto().metrics
    last = max((metric.step for metric in latest), default=-1)
    if last == -1:
        return -1
    logged = {_name(key): value for row in history if row.step == last for key, value in row.metrics.items()}
    stored = {metric.key: run.data.metrics[metric.key] for metric in latest if metric.step == last}
    same = stored.keys() == logged.keys() and all(_equal(stored[key], value) for key, value in logged.items())
    return last if same else None


def _equal(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


def _name(key: str) -> str:
    """With the characters that MLflow admits, as verl writes it: `mean@8` is `mean_at_8`."""
    return re.sub(r"[^\w./ -]", "_", key.replace("@", "_at_"))


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text[:CHARACTERS_PER_PARAMETER]


TRACKER = MlflowTracker
