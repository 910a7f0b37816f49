"""A batch that cannot be prepared has moved nothing, and its errors say so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import offload
from offload.route import Route
from tests.sched import contents, on_both, sim_scheduler, state, threads_scheduler


def refuse(*_: object) -> None:
    raise RuntimeError("no room for descriptors")


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("opened", [sim_scheduler, threads_scheduler])
@on_both
async def test_what_could_not_be_prepared_has_copied_nothing(
    opened: Callable[[], Any], streaming: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names no layer and no torn page, and the host page is loaded as it was."""
    async with opened() as (scheduler, *simulated, device, host):
        before = contents(host, [5])
        with monkeypatch.context() as patched:
            patched.setattr(Route, "prepare", refuse)
            backup = await scheduler.backup(device_pages=[0], host_pages=[5], streaming=streaming)
            if streaming:
                backup.layer_written(2)
            for sim in simulated:
                await sim.run_until_idle()
            with pytest.raises(offload.TransferFailed) as caught:
                await backup
        assert str(caught.value) == (
            f"backup {backup.id} failed while it was prepared: RuntimeError: no room for descriptors. "
            "Nothing was copied."
        )
        assert caught.value.layer is None
        assert isinstance(caught.value.__cause__, RuntimeError)
        await backup.source_reusable()
        assert state(backup) == "failed"
        load = await scheduler.load(host_pages=[5], device_pages=[1])
        for sim in simulated:
            await sim.run_until_idle()
        await load
        assert contents(device, [1]) == before
