"""The administrative routes: who may, what is refused, and that they reach the engines."""

from __future__ import annotations

import pytest

BODIES = {
    "/v1/admin/scale": {"dp": 2},
    "/v1/admin/rebalance": {"dp": 2},
    "/v1/admin/drain": {"machine": 1},
}


@pytest.fixture
def admin_key_file(tmp_path):
    (tmp_path / "admin").write_text("root\n")
    return str(tmp_path / "admin")


@pytest.mark.parametrize("path", BODIES)
async def test_they_are_off_without_admin_keys(launch, path):
    async with launch() as live:
        status, answer, _ = await live.post(path, BODIES[path])
        assert status == 403
        assert "--admin-key-file" in answer["error"]["message"]


@pytest.mark.parametrize("path", BODIES)
async def test_other_keys_do_not_open_them(launch, admin_key_file, path):
    async with launch(api_key=("user",), admin_key_file=admin_key_file) as live:
        status, answer, _ = await live.post(path, BODIES[path], X_Api_Key="user")
        assert status == 403
        assert answer["error"]["code"] == "insufficient_permissions"


@pytest.mark.parametrize("path", BODIES)
async def test_one_engine_says_that_it_is_no_fleet(launch, admin_key_file, path):
    async with launch(admin_key_file=admin_key_file) as live:
        status, answer, _ = await live.post(path, BODIES[path], X_Api_Key="root")
        assert status == 409
        assert "--dp" in answer["error"]["message"]
