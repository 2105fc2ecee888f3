"""Checkpoints in object stores and on web servers: a server here, and memory.

The server takes 5 ms for each request, counts what it sends, and fails as it is told.
No request leaves the machine.
"""

from __future__ import annotations

import collections
import functools
import http.server
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
import traceback
import urllib.request
import warnings
from pathlib import Path
from urllib.parse import urlsplit

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from command import invoke, run
from flax import serialization
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import treeadapt as ta
from treeadapt.checkpoints import array_boxes, orbax_folder, remote, save_load
from treeadapt.checkpoints.url import Url
from treeadapt.migrations.box_parts import whole

fsspec = pytest.importorskip("fsspec")
MemoryFileSystem = pytest.importorskip("fsspec.implementations.memory").MemoryFileSystem
SECRET = "?X-Sig=s3cr3t&user=me"
TREE = {
    "a": np.arange(12.0).reshape(3, 4),
    "b": {"c": np.ones(5, np.float32), "k": np.ones((2, 2), jnp.bfloat16)},
    "step": 7,
}
NAMES = ("m.safetensors", "shards", "z.npz", "f.msgpack", "checkpoint_4")


class Server:
    """A web server on a folder.

    Attributes:
        sent: bytes of all answers, but for headers.
        requests: of each kind and path.
        most: requests at the same time.
        fault: called with the path and range of each GET, and the number of requests;
            says what goes wrong.
    """

    def __init__(self, folder: Path, delay_s: float = 0.005) -> None:
        self.folder, self.delay_s = folder, delay_s
        self.fault = lambda path, number: ""
        self.reset()
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # else bodies wait for 40 ms

            def log_message(self, *_):
                pass

            def do_HEAD(self):
                server.answer(self)

            do_GET = do_HEAD

        class Many(http.server.ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64  # else connections wait for a second

        self.server = Many(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    def reset(self) -> None:
        self.sent, self.now, self.most, self.requests = 0, 0, 0, []
        self.lock = threading.Lock()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def answer(self, request) -> None:
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
            self.requests.append((request.command, request.path))
            number = len(self.requests)
        time.sleep(self.delay_s)
        with self.lock:
            self.now -= 1  # before the client can make another one
        self._answer(request, number)

    def _answer(self, request, number) -> None:
        is_get = request.command == "GET"
        wanted = request.headers["Range"] or ""
        fault = self.fault(f"{request.path} {wanted}", number) if is_get else ""
        file = self.folder / urlsplit(request.path).path.lstrip("/")
        if fault == "killed":
            request.close_connection = True
            request.connection.close()
            return
        if fault.startswith("/"):
            request.send_response(302)
            request.send_header("Location", fault)
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        if fault == "hangs":
            time.sleep(1)
        if not file.is_file() or fault.isdigit():
            request.send_response(int(fault or 404))
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        facts = file.stat()
        start, stop, status = 0, facts.st_size, 200
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", wanted)
        if match and fault != "whole":
            start, stop, status = int(match[1]), int(match[2]) + 1, 206
            if fault == "shifted":
                start, stop = start - 4, stop - 4
        with file.open("rb") as content:
            content.seek(start)
            body = content.read(stop - start) if is_get else b""
        if fault == "short":
            body = body[: len(body) // 2]
        request.send_response(status)
        size = len(body) if is_get else stop - start
        request.send_header("Content-Length", str(size))
        request.send_header("ETag", f'"{facts.st_mtime_ns}-{facts.st_ino}"')
        if status == 206 and fault != "unnamed":
            request.send_header(
                "Content-Range", f"bytes {start}-{stop - 1}/{facts.st_size}"
            )
        request.end_headers()
        if is_get:
            with self.lock:
                self.sent += len(body)
            step = len(body) // 8 + 1 if fault == "slow" else len(body) or 1
            for place in range(0, len(body), step):
                request.wfile.write(body[place : place + step])
                time.sleep(0.1 * (fault == "slow"))


@pytest.fixture
def web(tmp_path):
    pytest.importorskip("aiohttp")
    server = Server(tmp_path)
    yield server
    server.close()


def written(folder: Path) -> Path:
    """Write one tree in all forms."""
    ta.save(folder / "m.safetensors", TREE)
    ta.save(folder / "shards", TREE, max_shard_bytes=40)
    ta.save(folder / "s.schema.toml", TREE)
    np.savez(folder / "z.npz", **ta.to_flat_dict(TREE))
    for name in ("f.msgpack", "checkpoint_4"):
        (folder / name).write_bytes(serialization.to_bytes(TREE))
    return folder


@pytest.fixture
def memory(tmp_path):
    """Copy a folder to a store in memory; the URL of its copy."""
    fs = fsspec.filesystem("memory")

    def copied(folder: Path) -> str:
        for file in folder.rglob("*"):
            if file.is_file():
                fs.pipe(f"/bucket/{file.relative_to(folder)}", file.read_bytes())
        return "memory://bucket"

    yield copied
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]


def same(one, two):
    assert not ta.tree_diff(one, two, values=True)


def reads_everything(url: str, folder: Path, query: str = "") -> None:
    for name in NAMES:
        at = f"{url}/{name}{query}"
        assert ta.read_metadata(at) == ta.read_metadata(folder / name)
        same(ta.load(at), ta.load(folder / name))
        same(ta.load(at, TREE), TREE)
        assert ta.compare_checkpoint(at, TREE).fits
        text = run("show", folder / name)
        assert run("show", at).replace(at, "x") == text.replace(str(folder / name), "x")
        assert run("diff", folder / name, at, "--values") == "No difference.\n"
        to = folder / "converted.safetensors"
        run("convert", at, to, "--force")
        same(ta.load(to), ta.load(folder / name))
    assert ta.load(f"{url}/s.schema.toml{query}").keys() == TREE.keys()


@pytest.mark.slow
def test_all_formats_are_read_from_a_store_of_objects(tmp_path, memory):
    reads_everything(memory(written(tmp_path)), tmp_path)


@pytest.mark.slow
def test_all_formats_are_read_from_a_web_server(tmp_path, web):
    web.delay_s = 0.001
    reads_everything(web.url, written(tmp_path), SECRET)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["", "/"])
def test_a_folder_on_a_web_server_is_that_of_its_usual_files(name, tmp_path, web):
    (tmp_path / "a").mkdir()
    ta.save(tmp_path / "a" / "model.safetensors", TREE)
    ta.save(tmp_path / "b", TREE, max_shard_bytes=40)
    for folder in ("a", "b"):
        same(ta.load(f"{web.url}/{folder}{name}{SECRET}", TREE), TREE)
    with pytest.raises(
        ta.CheckpointError, match=f"There is no checkpoint '{web.url}/c"
    ):
        ta.load(f"{web.url}/c{name}")


# --- what is read ---

LARGE = {f"h.{n}.w": np.full((64, 8192), n, np.float32) for n in range(6)}
LARGE |= {f"h.{n}.b": np.arange(n, n + 64, dtype=np.float32) for n in range(6)}
STACK = {"h.{l}.w : r c": "h/w : r l c", "h.{l}.b : r": "h/b : r l"}


def header_bytes(folder: Path) -> int:
    total = 0
    for file in folder.iterdir():
        data = file.read_bytes()
        is_index = file.suffix == ".json"
        total += len(data) if is_index else 8 + int.from_bytes(data[:8], "little")
    return total


def as_process(monkeypatch, process: int, count: int) -> None:
    """Let ``load`` read what one of several processes needs, and give it as it is."""

    def rows(_, shape):
        step = shape[0] // count
        return [(slice(process * step, (process + 1) * step), *whole(shape[1:]))]

    monkeypatch.setattr(save_load, "boxes_to_read", rows)
    monkeypatch.setattr(save_load, "placed", lambda _, array, __: array)


@pytest.mark.slow
@pytest.mark.parametrize(("process", "count"), [(0, 1), (0, 4), (2, 4), (7, 8)])
@pytest.mark.parametrize("table", [None, STACK])
def test_no_more_is_read_than_headers_and_the_shards_of_a_process(
    process, count, table, tmp_path, web, monkeypatch
):
    folder = tmp_path / "run"
    ta.save(folder, LARGE, max_shard_bytes=2**22)
    m = ta.Migration(table) if table else None
    wanted = m(LARGE) if m else LARGE
    as_process(monkeypatch, process, count)
    target = jax.eval_shape(lambda: wanted)
    needed = 0
    for name, array in ta.load(f"{web.url}/run", target, migration=m).items():
        (box,), (part,) = array.boxes, array.arrays
        np.testing.assert_array_equal(part, wanted[name][box])
        needed += part.nbytes
    assert needed * count == sum(leaf.nbytes for leaf in LARGE.values())
    assert web.sent <= header_bytes(folder) + 1.05 * needed
    assert web.most <= 16


def test_what_is_between_small_ranges_is_read_over():
    path = remote.checkpoint_path("memory://bucket/x")
    big, small, gap = 2**20, 2**10, 2**17
    ranges = [(0, big), (big, 2 * big), (2 * big + gap, 2 * big + gap + small)]
    ranges += [
        (9 * big, 9 * big + small),
        (9 * big + gap, 11 * big),
        (12 * big, 13 * big),
    ]
    assert remote.joined((path, *each) for each in ranges) == [
        (path, 0, 2 * big + gap + small),
        (path, 9 * big, 11 * big),
        (path, 12 * big, 13 * big),
    ]


def test_columns_are_read_with_what_is_between_them(tmp_path, web):
    w = np.arange(2**18, dtype=np.float32).reshape(256, 1024)
    ta.save(tmp_path / "m.safetensors", {"w": w})
    mesh = Mesh(np.array(jax.devices()[:8]), ("x",))
    like = jax.ShapeDtypeStruct(
        w.shape, w.dtype, sharding=NamedSharding(mesh, P(None, "x"))
    )
    report = ta.compare_checkpoint(f"{web.url}/m.safetensors", {"w": like})
    assert report.extra_bytes == 0
    web.reset()
    read = ta.load(f"{web.url}/m.safetensors", {"w": like})["w"]
    np.testing.assert_array_equal(read, w)
    assert read.sharding == like.sharding
    # Each byte once, for all devices, and in few requests.
    assert web.sent <= w.nbytes + 2**10
    assert len(web.requests) < 10


def test_the_report_says_how_much_is_read_between_short_ranges(
    tmp_path, web, monkeypatch
):
    w = np.ones((256, 1024), np.float32)
    ta.save(tmp_path / "m.safetensors", {"w": w, "v": w})

    def columns(_, shape):
        return [(slice(0, shape[0]), slice(0, shape[1] // 8))]

    monkeypatch.setattr(save_load, "boxes_to_read", columns)
    url = f"{web.url}/m.safetensors"
    report = ta.compare_checkpoint(url, {"w": w}, where="w")
    assert "KiB between short ranges are read." in str(report)
    monkeypatch.setattr(save_load, "placed", lambda _, array, __: array)
    web.reset()
    ta.load(url, {"w": w}, where="w")
    assert 0 <= web.sent - report.extra_bytes - w.nbytes // 8 < 2**10  # the header
    local = ta.compare_checkpoint(tmp_path / "m.safetensors", {"w": w}, where="w")
    assert local.extra_bytes == 0


@pytest.mark.slow
def test_sixteen_requests_are_under_way_at_a_time(tmp_path, web, monkeypatch):
    web.delay_s = 0.1  # so that all are made before the first is answered
    # Of each array a small part, so that no two ranges are near each other.
    many = {f"w{n:03}": np.full((128, 2**10), n, np.float32) for n in range(48)}
    ta.save(tmp_path / "m.safetensors", many)
    as_process(monkeypatch, 0, 128)
    target = jax.eval_shape(lambda: many)
    monkeypatch.setattr(remote, "_GAP_BYTES", 0)
    assert remote.REQUESTS == 16
    for count in (16, 1):
        monkeypatch.setattr(remote, "REQUESTS", count)
        web.reset()
        ta.load(f"{web.url}/m.safetensors", target)
        assert web.most == count
        assert len(web.requests) >= len(many)


@pytest.mark.slow
@pytest.mark.parametrize("table", [None, {"{x} : a b": "k/{x} : b a"}])
def test_no_more_than_asked_for_is_in_flight(table, tmp_path, web, monkeypatch):
    many = {f"w{n:02}": np.full((512, 512), n, np.float32) for n in range(12)}
    ta.save(tmp_path / "m.safetensors", many)
    m = ta.Migration(table) if table else None
    wanted = m(many) if m else many
    web.delay_s = 0
    placed, most = [0], 2 * 2**20

    def drop(_, array, like):
        # What was sent and is not placed yet is on the host.
        assert web.sent - placed[0] <= most + 2**20 + 2**12
        placed[0] += like.size * like.dtype.itemsize
        return like

    monkeypatch.setattr(save_load, "placed", drop)
    target = jax.eval_shape(lambda: wanted)
    ta.load(f"{web.url}/m.safetensors", target, migration=m, max_inflight_bytes=most)
    assert placed[0] == sum(leaf.nbytes for leaf in many.values())
    for wrong in (0, -1, 1.5, None, True):
        with pytest.raises(ta.CheckpointError, match=r"max_inflight_bytes=.* integer"):
            ta.load(f"{web.url}/m.safetensors", max_inflight_bytes=wrong)


# --- what goes wrong ---

FAULTS = ("killed", "500", "short", "whole")


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", ["m.safetensors", "shards", "z.npz", "f.msgpack"])
def test_a_request_that_fails_is_made_again(fault, name, tmp_path, web, monkeypatch):
    monkeypatch.setattr(remote, "_WAITS_S", (0.0, 0.0, 0.0))
    written(tmp_path)
    web.delay_s = 0
    times = collections.Counter()

    def thrice(what, _):
        times[what] += 1
        return fault if times[what] <= 3 else ""

    web.fault = thrice
    same(ta.load(f"{web.url}/{name}{SECRET}", TREE), TREE)


@pytest.mark.parametrize("fault", FAULTS)
def test_requests_that_always_fail_are_one_error(fault, tmp_path, web, monkeypatch):
    waits = []
    monkeypatch.setattr(remote, "_pause", waits.append)
    written(tmp_path)
    web.fault = lambda path, _: fault * ("m.safetensors" in path)
    with pytest.raises(ta.CheckpointError) as caught:
        ta.load(f"{web.url}/m.safetensors{SECRET}", TREE)
    said = str(caught.value)
    assert f"{web.url}/m.safetensors' cannot be read. The request failed each" in said
    assert waits == [0.1, 0.5, 2.0]
    assert "s3cr3t" not in said
    if fault == "500":
        assert "500" in said


@pytest.mark.parametrize("status", ["401", "403", "429", "503"])
def test_what_a_server_refuses_is_said(status, tmp_path, web, monkeypatch):
    monkeypatch.setattr(remote, "_WAITS_S", ())
    written(tmp_path)
    web.fault = lambda *_: status
    with pytest.raises(ta.CheckpointError, match=status):
        ta.load(f"{web.url}/m.safetensors", TREE)


@pytest.mark.parametrize("fault", ["shifted", "unnamed"])
def test_another_range_than_asked_for_is_not_taken(fault, tmp_path, web, monkeypatch):
    monkeypatch.setattr(remote, "_WAITS_S", ())
    ta.save(tmp_path / "m.safetensors", LARGE)
    web.fault = lambda path, _: fault * ("bytes=0-" not in path)
    with pytest.raises(ta.CheckpointError, match=r"asked for bytes \d+-\d+ and ans"):
        ta.load(f"{web.url}/m.safetensors")


def test_a_server_without_ranges_is_named_and_its_file_can_be_downloaded(
    tmp_path, monkeypatch
):
    pytest.importorskip("aiohttp")
    monkeypatch.setattr(remote, "_WAITS_S", ())
    ta.save(tmp_path / "m.safetensors", TREE)
    handler = functools.partial(Quiet, directory=tmp_path)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_address[1]}/m.safetensors"
        with pytest.raises(ta.CheckpointError, match=r"no ranges\. Download it and lo"):
            ta.load(url)
        file, _ = urllib.request.urlretrieve(url, tmp_path / "copy.safetensors")
        same(ta.load(file, TREE), TREE)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.mark.slow
def test_a_request_that_is_slow_is_no_failure(tmp_path, web, monkeypatch):
    monkeypatch.setattr(remote, "_SILENCE_S", 0.4)
    monkeypatch.setattr(remote, "_WAITS_S", ())
    ta.save(tmp_path / "m.safetensors", LARGE)
    web.fault = lambda *_: "slow"  # 0.8 s
    same(ta.load(f"{web.url}/m.safetensors", where="h.0.b"), {"h.0.b": LARGE["h.0.b"]})


@pytest.mark.slow
def test_after_silence_half_of_a_range_is_asked_for(tmp_path, web, monkeypatch):
    monkeypatch.setattr(remote, "_SILENCE_S", 0.2)
    monkeypatch.setattr(remote, "_WAITS_S", ())
    monkeypatch.setattr(remote, "_REQUEST_BYTES", (2**18, 2**21))
    ta.save(tmp_path / "m.safetensors", LARGE)

    def hangs_where_long(path, _):
        start, stop = map(int, re.search(r"bytes=(\d+)-(\d+)", path).groups())
        return "hangs" * (stop - start >= 2**19)

    web.fault = hangs_where_long
    same(ta.load(f"{web.url}/m.safetensors"), LARGE)


@pytest.mark.slow
def test_where_many_requests_hang_fewer_are_made_with_a_smaller_limit(
    tmp_path, web, monkeypatch
):
    monkeypatch.setattr(remote, "_SILENCE_S", 0.2)
    monkeypatch.setattr(remote, "_WAITS_S", ())
    monkeypatch.setattr(remote, "_REQUEST_BYTES", (2**18, 2**19))
    ta.save(tmp_path / "m.safetensors", LARGE)
    open_now = []

    def hangs_where_others_do(path, number):
        open_now.append(number)
        threading.Timer(0.05, open_now.remove, [number]).start()
        return "hangs" * (len(open_now) > 2)

    web.fault, web.delay_s = hangs_where_others_do, 0.06
    with pytest.raises(ta.CheckpointError, match="Pass a smaller max_inflight_bytes="):
        ta.load(f"{web.url}/m.safetensors")
    time.sleep(0.1)
    same(ta.load(f"{web.url}/m.safetensors", max_inflight_bytes=2**17), LARGE)


def test_a_server_that_is_not_there_is_not_a_missing_file(web, monkeypatch):
    monkeypatch.setattr(remote, "_WAITS_S", ())
    web.close()
    with pytest.raises(ta.CheckpointError, match="The request failed"):
        ta.load(f"{web.url}/m.safetensors", TREE)


@pytest.mark.parametrize("name", ["m.safetensors", "shards", "f.msgpack"])
def test_a_file_that_changes_while_it_is_read_is_an_error(name, tmp_path, web):
    written(tmp_path)
    file = tmp_path / name
    if file.is_dir():
        file = sorted(file.glob("*.safetensors"))[1]
    other = file.read_bytes()

    def replace(path, number):
        if file.name in path and not done:
            done.append(number)
            file.write_bytes(other)  # which has another time
        return ""

    done: list[int] = []
    web.fault = replace
    with pytest.raises(ta.CheckpointError, match="was replaced while it was read"):
        ta.load(f"{web.url}/{name}", TREE)
    assert done
    same(ta.load(f"{web.url}/{name}", TREE), TREE)


def test_a_file_in_a_store_that_changes_while_it_is_read_is_an_error(
    tmp_path, memory, monkeypatch
):
    url = memory(written(tmp_path))
    fs = fsspec.filesystem("memory")
    placed = save_load.placed

    def replaced(*arguments):
        fs.pipe("/bucket/m.safetensors", (tmp_path / "m.safetensors").read_bytes())
        return placed(*arguments)

    monkeypatch.setattr(save_load, "placed", replaced)
    with pytest.raises(ta.CheckpointError, match="was replaced while it was read"):
        ta.load(f"{url}/m.safetensors", TREE)


def test_a_file_that_vanishes_while_it_is_read_is_an_error(tmp_path, web):
    written(tmp_path)
    web.fault = lambda _, number: "404" if number > 3 else ""
    with pytest.raises(ta.CheckpointError):
        ta.load(f"{web.url}/m.safetensors", TREE)


OUTWARD = (
    "../a",
    "/a",
    "a/b",
    "..%2Fa",
    "a?b",
    "http://other/a",
    "a#b",
    "a\\b",
    ".a",
    "a%00",
)


@pytest.mark.parametrize("name", OUTWARD)
def test_an_index_leads_to_no_other_folder_or_host(name, tmp_path, web):
    ta.save(tmp_path / "run", TREE, max_shard_bytes=2**20)
    (shard,) = (tmp_path / "run").glob("*.safetensors")
    index = tmp_path / "run" / "model.safetensors.index.json"
    outward = json.dumps(f"{name}.safetensors")
    index.write_text(index.read_text().replace(json.dumps(shard.name), outward))
    web.reset()
    with pytest.raises(ta.CheckpointError, match="is not a file in it"):
        ta.load(f"{web.url}/run")
    names = {urlsplit(path).path for _, path in web.requests}
    assert names <= {"/run", *(f"/run/{name}" for name in remote._TRIED)}


# What follows a letter that ends a URL, or a part of it, in a text or for a library.
SECRETS = ["s3cr3t", "a@s3cr3t", "a s3cr3t", "a'\"s3cr3t", "a/s3cr3t", "a%40s3cr3t"]
SECRETS += ["a?s3cr3t", "a#s3cr3t", "a)>]s3cr3t", "a://s3cr3t", "a\ts3cr3t"]


@pytest.mark.slow
@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("place", ["password", "user", "query", "fragment"])
def test_the_secrets_of_a_url_are_never_shown(
    place, secret, tmp_path, web, monkeypatch
):
    if place == "user" and {*secret} & {*"/?#"}:
        pytest.skip("it is another URL, of a host 'a'")
    monkeypatch.setattr(remote, "_WAITS_S", ())
    is_plain = secret == "s3cr3t"  # the others are read in fewer ways
    _ = written(tmp_path) if is_plain else ta.save(tmp_path / "m.safetensors", TREE)
    (tmp_path / "cut.safetensors").write_bytes(b"\x80\0\0\0\0\0\0\0{")
    (tmp_path / "page").write_bytes(b"<html>")
    texts = []

    def message(call):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                call()
            except ta.TreeAdaptError as error:
                texts.extend(traceback.format_exception(error))
                texts.append(str(error))
        texts.extend(str(each.message) for each in caught)

    user = {"password": f"me:{secret}@", "user": f"{secret}@"}.get(place, "")
    query = {"query": f"?X-Sig={secret}&user=me", "fragment": f"#{secret}"}
    query = query.get(place, "")
    url, web.delay_s = web.url.replace("//", f"//{user}"), 0
    all_names = (*NAMES, "none.npz", "cut.safetensors", "page", "x/y", "s.schema.toml")
    for fault in ("", "500", "/other?sig=s3cr3t"):
        web.fault = lambda *_, fault=fault: fault
        for name in all_names if is_plain else ("m.safetensors", "cut.safetensors"):
            at = f"{url}/{name}{query}"
            message(lambda at=at: ta.load(at, {"z": np.ones(3)}))
            message(lambda at=at: ta.load(at, TREE, migration="tunix"))
            if is_plain or fault:  # a draft without a fault is a long way to no message
                message(lambda at=at: ta.draft_migration(at, TREE))
            commands = [("show", at), ("diff", at, at), ("lint", at, at)]
            commands += [("draft", at, at), ("convert", at, tmp_path / "to")]
            for command in commands if is_plain and "." in name else ():
                done = invoke(*command)
                texts += [done.stdout, done.stderr]
    message(lambda: ta.load(f"{url}/m.safetensors{query}", max_inflight_bytes=0))
    message(lambda: ta.save(f"{url}/m.safetensors{query}", TREE))
    for scheme in ("nosuch+https://", "simplecache::https://", "zip://a::https://"):
        message(lambda at=f"{scheme}{user}127.0.0.1:1/x{query}": ta.load(at))
    assert len(texts) > 30
    assert not [text for text in texts if "s3cr3t" in text]


def test_what_a_library_says_is_shown_where_no_secret_is_in_it():
    url = Url.of("https://me:pass%20word@host/x?sig=a+b&user=me")
    for text in ("pass word", "PASS%20word".lower(), "pass%2520word", "a b", "'a+b'"):
        assert url.said_by(OSError(f"no {text} here")) == "OSError"
    assert url.said_by(OSError("see http://other/y")) == "OSError"
    assert url.said_by(OSError("refused by host")) == "OSError: refused by host"
    assert (
        Url.of("gs://b/a#b").said_by(KeyError("gs://b/a#b")) == "KeyError: 'gs://b/a#b'"
    )
    assert str(Url.of("s3://arn:aws:s3:eu:12:accesspoint/x/y")).endswith("point/x/y")


def test_a_url_is_not_written_to_and_not_a_path(tmp_path):
    with pytest.raises(ta.CheckpointError, match="are written to files and folders of"):
        ta.save("gs://bucket/model.safetensors", TREE)
    with pytest.raises(
        ta.CheckpointError, match=r"Pass the text gs://\.\.\., which Path"
    ):
        ta.load(Path("gs://bucket/model.safetensors"))
    with pytest.raises(ta.CheckpointError, match="Protocol not known: nosuch"):
        ta.load("nosuch://bucket/x")
    ta.save(tmp_path / "m.safetensors", TREE)
    same(ta.load((tmp_path / "m.safetensors").as_uri(), TREE), TREE)


@pytest.mark.parametrize("missing", ["fsspec", "aiohttp"])
def test_without_what_reads_a_store_a_sentence_says_what_to_install(
    missing, monkeypatch
):
    for name in [*sys.modules]:
        if name.partition(".")[0] == missing or name.startswith("fsspec"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    said = r'pip install "treeadapt\[remote\]", with gcsfs for gs://'
    with pytest.raises(ta.CheckpointError, match=said):
        ta.load("https://localhost/model.safetensors")


# --- Orbax ---


class Local:
    """In the place of Orbax' reader, reads a folder here and notes what it is asked."""

    def __init__(self, reader, folder, asked):
        self.reader, self.folder, self.asked = reader, folder, asked

    def __enter__(self):
        self.reader.__enter__()
        return self

    def __exit__(self, *error):
        return self.reader.__exit__(*error)

    def _path(self, path):
        self.asked.append(path)
        return self.folder / str(path).partition("bucket/")[2]

    def metadata(self, path):
        return self.reader.metadata(self._path(path))

    def restore(self, path, **options):
        return self.reader.restore(self._path(path), **options)


def test_orbax_gets_the_url_of_a_folder_as_it_is(tmp_path, memory, monkeypatch):
    class Google(MemoryFileSystem):
        protocol = ("gs",)

        @classmethod
        def _strip_protocol(cls, path):
            return super()._strip_protocol(path.replace("gs://", "memory://"))

    fsspec.register_implementation("gs", Google, clobber=True)
    for step in (9, 10, 11):
        (tmp_path / "run" / f"{step}").mkdir(parents=True)
        ta.save(tmp_path / "run" / f"{step}" / "default", {"w": np.full(3, step)})
        marker = tmp_path / "run" / f"{step}" / "commit_success.txt"
        if step < 11:  # the last one is being written
            marker.touch()
    memory(tmp_path)
    asked, reader = [], orbax_folder._checkpointer
    monkeypatch.setattr(
        orbax_folder, "_checkpointer", lambda: Local(reader(), tmp_path, asked)
    )
    assert ta.load("gs://bucket/run/9")["w"][0] == 9
    assert {os.fspath(path) for path in asked} == {"gs://bucket/run/9/default"}
    target = {"w": np.zeros(3, int)}
    with pytest.warns(ta.TreeAdaptWarning, match=r"'10', is read.*'11' incomplete"):
        assert ta.load("gs://bucket/run/", target)["w"][0] == 10
    assert {*ta.read_metadata("gs://bucket/run/9/default")} == {"w"}


def test_a_configuration_in_a_store_is_read_for_a_published_table(tmp_path, memory):
    sizes = {"model_type": "none", "hidden_size": 2}
    ta.save(tmp_path / "model.safetensors", TREE)
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    with pytest.raises(ta.MigrationError, match="model type 'none'"):
        ta.load(memory(tmp_path), TREE, migration="tunix")


# --- servers as they are ---


@pytest.mark.slow
def test_a_server_that_hangs_is_an_error_in_time(tmp_path, web, monkeypatch):
    monkeypatch.setattr(remote, "_LIMIT_S", 0.2)
    monkeypatch.setattr(remote, "_WAITS_S", (0.0,))
    written(tmp_path)
    web.delay_s = 3
    begin = time.perf_counter()
    with pytest.raises(ta.CheckpointError, match="The request failed each time"):
        ta.load(f"{web.url}/m.safetensors", TREE)
    assert time.perf_counter() - begin < 3


@pytest.mark.slow
def test_a_process_holds_no_more_than_the_result_and_what_is_in_flight(tmp_path, web):
    # In a process of its own, whose largest size counts.
    many = {f"w{n:02}": np.full((2**20,), n, np.float32) for n in range(48)}
    ta.save(tmp_path / "m.safetensors", many)
    program = f"""
import re, numpy as np, treeadapt as ta
def peak():
    text = open("/proc/self/status").read()
    return int(re.search(r"VmHWM:\\s+(\\d+)", text)[1]) * 1024
url, most = "{web.url}/m.safetensors", 2**24
ta.load(url, where="w00", max_inflight_bytes=most)
before = peak()
tree = ta.load(url, max_inflight_bytes=most)
print(peak() - before - sum(leaf.nbytes for leaf in tree.values()) - most - 2**22)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) <= 2**23, done.stdout  # 8 MiB for all else


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_any_checkpoint_is_read_from_a_server_as_from_a_folder(
    seed, tmp_path, web, monkeypatch
):
    """Random leaves, tables, shards and limits so small that each of them is met."""
    draw, web.delay_s = random.Random(seed), 0
    least = draw.choice([1, 64, 256])
    monkeypatch.setattr(remote, "_REQUEST_BYTES", (least, draw.choice([17, 5000])))
    monkeypatch.setattr(remote, "_GAP_BYTES", draw.choice([0, 32, 2000]))
    monkeypatch.setattr(array_boxes, "_BLOCK_BYTES", draw.choice([64, 1000]))
    tree, rows = {}, {}
    for name in "pqr"[: draw.randint(1, 3)]:
        axes = [f"x{n}" for n in range(draw.randint(1, 3))]
        shape = [draw.choice([4, 8, 16]) for _ in axes]
        dtype = draw.choice(["float32", "bfloat16", "int8"])
        for layer in range(3):
            values = np.arange(np.prod(shape)).reshape(shape) % 99 + layer
            tree[f"h.{layer}.{name}"] = values.astype(dtype)
        moved = draw.sample(["l", *axes], len(axes) + 1)
        rows[f"h.{{l}}.{name} : {' '.join(axes)}"] = f"s/{name} : {' '.join(moved)}"
    m = ta.Migration(rows) if draw.random() < 0.7 else None
    wanted = m(tree) if m else tree
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("a", "b"))

    def like(leaf):
        if draw.random() < 0.2:
            return np.zeros_like(leaf)
        axes = draw.sample(["a", "b", None, None, None], leaf.ndim)
        sizes = {"a": 2, "b": 4, None: 1}
        fit = (leaf.shape[n] % sizes[axis] == 0 for n, axis in enumerate(axes))
        spec = P(*(axis if yes else None for axis, yes in zip(axes, fit, strict=True)))
        place = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

    target = {name: like(leaf) for name, leaf in wanted.items()}
    ta.save(tmp_path / "run", tree, max_shard_bytes=draw.choice([50, 500, 5000]))
    most = draw.choice([1, 100, 10_000, 2**31])
    read = ta.load(f"{web.url}/run", target, migration=m, max_inflight_bytes=most)
    for name, leaf in wanted.items():
        assert np.asarray(read[name]).tobytes() == leaf.tobytes()
        place = getattr(target[name], "sharding", None)
        assert getattr(read[name], "sharding", None) == place


def test_what_a_store_has_listed_hides_no_change(tmp_path, memory, monkeypatch):
    class Listed(MemoryFileSystem):
        """Answers from the listing of a folder, and takes no option against that."""

        protocol = ("listed",)
        listings: dict = {}

        def __init__(self, **options):
            if "use_listings_cache" in options:
                raise TypeError("no such option")
            super().__init__(**options)

        @classmethod
        def _strip_protocol(cls, path):
            return super()._strip_protocol(path.replace("listed://", "memory://"))

        def ls(self, path, detail=True, **_):
            rows = self.listings.get(path) or super().ls(path, detail=True)
            self.listings[path] = rows
            return rows if detail else [row["name"] for row in rows]

        def info(self, path, **_):
            rows = {
                row["name"]: row for row in self.listings.get(self._parent(path), [])
            }
            return rows.get(path) or super().info(path)

        def invalidate_cache(self, path=None):
            self.listings.pop(self._parent(path), None)

    fsspec.register_implementation("listed", Listed, clobber=True)
    ta.save(tmp_path / "x.1.safetensors", TREE)
    memory(tmp_path)
    same(ta.load("listed://bucket", TREE), TREE)
    placed, fs = save_load.placed, fsspec.filesystem("memory")

    def replaced(*arguments):
        fs.pipe("/bucket/x.1.safetensors", fs.cat("/bucket/x.1.safetensors"))
        return placed(*arguments)

    monkeypatch.setattr(save_load, "placed", replaced)
    with pytest.raises(ta.CheckpointError, match="was replaced while it was read"):
        ta.load("listed://bucket", TREE)
