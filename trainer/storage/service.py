"""What the object storage service can do, one object at a time: list, look, read, download, upload, delete.

Every call persists through what passes (408, 429, 5xx, broken, trickling and corrupting connections) with jittered
pauses until a deadline, and fails at once on what does not (401, 403, 404, 412), with a message that says what to do.

The metadata calls go through google-cloud-storage. The bytes of objects go through google-auth's session, because the
client's own transfers read 8 KiB at a time or whole objects into memory, check nothing once a download was resumed,
never notice a connection that trickles, and delete an object whose upload arrived damaged. Every transfer here is
checked against the object's CRC32C, also across resumed parts.
"""

import base64
import contextlib
import functools
import itertools
import json
import logging
import mimetypes
import os
import random
import re
import secrets
import time
from collections.abc import Callable, Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote

# The client would fetch the bucket's metadata in the background, which needs a permission that trainers lack.
os.environ.setdefault("DISABLE_GCS_PYTHON_CLIENT_OTEL_BUCKET_METADATA", "true")

import google.auth
import google_crc32c
import requests
import urllib3
from google.api_core import exceptions as api
from google.auth import exceptions as auth
from google.auth.credentials import AnonymousCredentials
from google.auth.transport.requests import AuthorizedSession
from google.cloud import storage as google_storage

from trainer.errors import BadInput, WorldFailure
from trainer.storage import waiting
from trainer.storage.errors import Conflict, Denied, NotFound, unreachable

logger = logging.getLogger(__name__)

NUM_THREADS = 8

_TIMEOUT_SECS = (20.0, 60.0)  # to connect and to send one block; until the service says anything
_FIRST_PAUSE_SECS, _LONGEST_PAUSE_SECS, _QUIET_PAUSE_SECS = 0.2, 30.0, 5.0
_DOWNLOAD_BLOCK_BYTES = 1 << 20
_UPLOAD_BLOCK_BYTES = 1 << 18
_PROGRESS_BYTES = 1 << 20  # a download that got this much further may start its deadline anew
# A connection that brings less than this in one window is given up, and the download goes on over a new one.
TRICKLE_BYTES, TRICKLE_WINDOW_SECS = 1 << 19, 30.0

_SCOPES = ["https://www.googleapis.com/auth/devstorage.read_write"]
_NONCE = "trireme-nonce"
_PASSING = (
    ConnectionError,
    TimeoutError,
    HTTPException,
    requests.ConnectionError,
    requests.Timeout,
    requests.exceptions.ChunkedEncodingError,
    urllib3.exceptions.HTTPError,
    auth.TransportError,
)


class Entry(NamedTuple):
    """One object as the service lists it."""

    name: str
    size: int
    crc32c: str  # base64, as in the service's own answers
    generation: int | None  # None: whichever is there
    encoding: str | None = None  # "gzip" if the bytes are a compressed form of the file


class Sink(Protocol):
    """Where a download goes."""

    def write(self, block: bytes) -> Any:
        """Take the next bytes."""

    def restart(self) -> None:
        """Forget all that was written."""


class _Broken(Exception):
    """The bytes that came, or that arrived, are not the right ones; another try may bring them."""


def list_entries(bucket: str, prefix: str, limit: int | None = None) -> list[Entry]:
    """Return all objects whose names begin with `prefix`, in order."""

    def attempt() -> list[Entry]:
        blobs = _client().list_blobs(
            bucket,
            prefix=prefix or None,
            max_results=limit,
            fields="nextPageToken,items(name,size,crc32c,generation,contentEncoding)",
            timeout=_TIMEOUT_SECS,
            retry=None,
        )
        return [_entry(blob) for blob in blobs]

    return _persist(attempt, bucket, prefix, "storage.objects.list")


def list_prefixes(bucket: str, prefix: str) -> list[str]:
    """Return the names that go on after `prefix` with a slash, up to that slash."""

    def attempt() -> list[str]:
        pages = _client().list_blobs(bucket, prefix=prefix or None, delimiter="/", timeout=_TIMEOUT_SECS, retry=None)
        for _ in pages:
            pass
        return sorted(found.removeprefix(prefix).rstrip("/") for found in pages.prefixes)

    return _persist(attempt, bucket, prefix, "storage.objects.list")


def find(bucket: str, name: str) -> Entry | None:
    """Return one object's entry, None if it is not there."""
    found = _find(bucket, name)
    return None if found is None else _entry(found)


def read(bucket: str, name: str) -> tuple[bytes | None, int]:
    """Return a small object's content and generation, which belong together; `(None, 0)` if it is not there."""

    def attempt() -> tuple[bytes, int]:
        answer = _session().get(_media_url(bucket, name), headers={"Accept-Encoding": "gzip"}, timeout=_TIMEOUT_SECS)
        _check(answer)
        told = re.search(r"crc32c=([A-Za-z0-9+/=]+)", answer.headers.get("x-goog-hash", ""))
        encoded = answer.headers.get("x-goog-stored-content-encoding", "identity") != "identity"
        if told and not encoded and told[1] != crc32c(answer.content):
            raise _Broken("its checksum is not the one that the service told")
        return answer.content, int(answer.headers["x-goog-generation"])

    try:
        return _persist(attempt, bucket, name, "storage.objects.get")
    except NotFound:
        return None, 0


def download(bucket: str, entry: Entry, sink: Sink) -> None:
    """Write an object's stored bytes to `sink`; a broken connection is resumed where it broke.

    Raises:
        NotFound: The object is not there, or was replaced since it was listed.
        WorldFailure: It did not come whole and with its checksum before the deadline.
    """
    got, checksum = 0, google_crc32c.Checksum()

    def restart() -> None:
        nonlocal got, checksum
        got, checksum = 0, google_crc32c.Checksum()
        sink.restart()

    def attempt() -> None:
        nonlocal got
        headers = {"Accept-Encoding": "gzip"}  # the stored bytes, please: their checksum is the one that is known
        if got:
            headers["Range"] = f"bytes={got}-"
        address = _media_url(bucket, entry.name, entry.generation)
        with _session().get(address, headers=headers, stream=True, timeout=_TIMEOUT_SECS) as answer:
            _check(answer)
            if got and answer.status_code != requests.codes.partial_content:
                restart()
            window_ends, window_got = time.monotonic() + TRICKLE_WINDOW_SECS, got
            while block := answer.raw.read1(_DOWNLOAD_BLOCK_BYTES, decode_content=False):
                sink.write(block)
                checksum.update(block)
                got += len(block)
                if got < entry.size and (now := time.monotonic()) > window_ends:
                    if got - window_got < TRICKLE_BYTES:
                        raise _Broken(f"only {got - window_got} bytes came in {TRICKLE_WINDOW_SECS:g} s")
                    window_ends, window_got = now + TRICKLE_WINDOW_SECS, got
        if got < entry.size:
            raise _Broken(f"{got} of {entry.size} bytes came")
        if got > entry.size or base64.b64encode(checksum.digest()).decode() != entry.crc32c:
            restart()
            raise _Broken("what came has another checksum than the object")

    _persist(attempt, bucket, entry.name, "storage.objects.get", progress=lambda: got)


def upload(bucket: str, name: str, content: Path, if_generation: int) -> Entry:
    """Send a file as one object.

    What arrives damaged is there until it is sent again: only for places where nobody looks yet. It is the quickest
    way, because nothing has to be computed beforehand.

    Args:
        bucket: Its bucket.
        name: Its name.
        content: The file.
        if_generation: Write only over this generation; 0 means only where nothing is.

    Raises:
        Conflict: Another generation is there.
        WorldFailure: The service failed until the deadline, or the file changed meanwhile.
    """
    stamp, expected = _stamp(content), if_generation
    body = _FileBody(content)

    def attempt() -> Entry:
        nonlocal expected
        answer = _session().post(
            _upload_url(bucket, "media", expected) + f"&name={quote(name, safe='')}",
            data=body if len(body) else b"",  # requests would send an empty stream in chunks
            headers={"Content-Type": _content_type(name)},
            timeout=_TIMEOUT_SECS,
        )
        if answer.status_code == requests.codes.precondition_failed:
            arrived = find(bucket, name)
            if arrived is None or (arrived.size, arrived.crc32c) != (len(body), crc32c(content)):
                raise _conflict(bucket, name, arrived, if_generation)
            return arrived  # it had landed, and only the answer was lost
        _check(answer)
        told = answer.json()
        arrived = Entry(name, int(told["size"]), told["crc32c"], int(told["generation"]))
        if stamp != _stamp(content):
            raise WorldFailure(f"{content}: changed while it was published; publish it again when it is at rest")
        if (arrived.size, arrived.crc32c) != (len(body), body.crc32c):
            expected = arrived.generation  # what is to be replaced now is our own damaged object
            raise _Broken("it arrived with another checksum")
        return arrived

    return _persist(attempt, bucket, name, "storage.objects.create")


def write(bucket: str, name: str, content: bytes, if_generation: int | None) -> int:
    """Write a small object that others are watching; return its generation.

    The service is told the checksum beforehand and refuses what arrives damaged.

    Args:
        bucket: Its bucket.
        name: Its name.
        content: Its bytes.
        if_generation: Write only over this generation; 0 means only where nothing is, None means over anything.

    Raises:
        Conflict: Another generation is there.
        WorldFailure: The service failed until the deadline.
    """
    nonce, boundary = secrets.token_hex(16), secrets.token_hex(16)
    described = {
        "name": name,
        "crc32c": crc32c(content),
        "contentType": _content_type(name),
        "cacheControl": "no-store",  # a public bucket's caches would answer with an old one
        "metadata": {_NONCE: nonce},
    }
    head = f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{json.dumps(described)}\r\n"
    head += f"--{boundary}\r\nContent-Type: {described['contentType']}\r\n\r\n"
    body = head.encode() + content + f"\r\n--{boundary}--\r\n".encode()

    def attempt() -> int:
        answer = _session().post(
            _upload_url(bucket, "multipart", if_generation),
            data=body,
            headers={"Content-Type": f"multipart/related; boundary={boundary}"},
            timeout=_TIMEOUT_SECS,
        )
        if answer.status_code == requests.codes.precondition_failed:
            there = _find(bucket, name)
            if there is None or (there.metadata or {}).get(_NONCE) != nonce:
                raise _conflict(bucket, name, there, if_generation)
            return int(there.generation)  # it had landed, and only the answer was lost
        _check(answer)
        return int(answer.json()["generation"])

    return _persist(attempt, bucket, name, "storage.objects.create")


def delete(bucket: str, name: str) -> None:
    """Delete one object; one that is not there is no error."""

    def attempt() -> None:
        _client().bucket(bucket).blob(name).delete(timeout=_TIMEOUT_SECS, retry=None)

    with contextlib.suppress(NotFound):
        _persist(attempt, bucket, name, "storage.objects.delete")


def crc32c(content: bytes | Path) -> str:
    """Return the CRC32C of bytes or of a file, in base64 as the service writes it."""
    checksum = google_crc32c.Checksum()
    if isinstance(content, Path):
        with content.open("rb", buffering=0) as file:
            while block := file.read(_DOWNLOAD_BLOCK_BYTES):
                checksum.update(block)
    else:
        checksum.update(content)
    return base64.b64encode(checksum.digest()).decode()


class _FileBody:
    """A file as an upload's body, read and summed a block at a time, anew for each try.

    It has a length, so that it is sent as it is, not in HTTP's chunks.
    """

    def __init__(self, path: Path):
        self._path, self._size = path, path.stat().st_size
        self.crc32c = crc32c(b"")  # of what was sent last

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[bytes]:
        checksum, left = google_crc32c.Checksum(), self._size
        with self._path.open("rb", buffering=0) as file:
            while left and (block := file.read(min(left, _UPLOAD_BLOCK_BYTES))):
                left -= len(block)
                checksum.update(block)
                self.crc32c = base64.b64encode(checksum.digest()).decode()
                yield block
        if left:
            raise WorldFailure(f"{self._path}: changed while it was published; publish it again when it is at rest")


def _stamp(path: Path) -> tuple[int, int, int]:
    stat = path.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _conflict(bucket: str, name: str, there: Any, expected: int | None) -> Conflict:
    found = there.generation if there else 0
    return Conflict(f"gs://{bucket}/{name}: changed meanwhile (generation {found}, expected {expected})")


def _content_type(name: str) -> str:
    return mimetypes.guess_type(name)[0] or "application/octet-stream"


def _upload_url(bucket: str, kind: str, if_generation: int | None) -> str:
    condition = "" if if_generation is None else f"&ifGenerationMatch={if_generation}"
    return f"{_client().api_endpoint}/upload/storage/v1/b/{quote(bucket, safe='')}/o?uploadType={kind}{condition}"


def _find(bucket: str, name: str) -> google_storage.Blob | None:
    def attempt() -> google_storage.Blob | None:
        return _client().bucket(bucket).get_blob(name, timeout=_TIMEOUT_SECS, retry=None)

    return _persist(attempt, bucket, name, "storage.objects.get")


def _entry(blob: google_storage.Blob) -> Entry:
    return Entry(blob.name, int(blob.size), blob.crc32c, int(blob.generation), blob.content_encoding or None)


def _media_url(bucket: str, name: str, generation: int | None = None) -> str:
    pinned = "" if generation is None else f"&generation={generation}"
    place = f"/download/storage/v1/b/{quote(bucket, safe='')}/o/{quote(name, safe='')}?alt=media{pinned}"
    return _client().api_endpoint + place


def _check(answer: requests.Response) -> None:
    if answer.status_code >= requests.codes.bad_request:
        raise api.from_http_response(answer)


def _persist(
    attempt: Callable[[], Any], bucket: str, name: str, permission: str, progress: Callable[[], int] = lambda: 0
) -> Any:
    """Call `attempt` until it succeeds, fails for good, or has failed for `waiting.deadline_secs` without progress."""
    deadline, reached, pauses = time.monotonic() + waiting.deadline_secs, progress(), itertools.count()
    for tries in itertools.count(1):
        try:
            return attempt()
        except _Broken as error:
            said = str(error)
            told_pause = 0.0
        except (api.GoogleAPICallError, auth.GoogleAuthError, *_PASSING) as error:
            _raise_if_lasting(error, bucket, name, permission)
            said = _said(error)
            told_pause = _told_pause_secs(error)
        if progress() - reached >= _PROGRESS_BYTES:
            deadline, reached, pauses = time.monotonic() + waiting.deadline_secs, progress(), itertools.count()
        # Full jitter: many workers that failed together must not come back together.
        longest = min(_LONGEST_PAUSE_SECS, _FIRST_PAUSE_SECS * 2 ** min(next(pauses), 16))
        pause = max(told_pause, random.uniform(0, longest))  # noqa: S311 - spreads load, guards nothing
        if time.monotonic() + pause > deadline:
            raise WorldFailure(
                f"gs://{bucket}/{name}: gave up after {tries} tries in {waiting.deadline_secs:g} s without progress; "
                f"the last: {said}. What was done stays; start again when the service answers."
            )
        # The first pauses are short, and most of what passes has passed after them.
        level = logging.WARNING if pause > _QUIET_PAUSE_SECS else logging.INFO
        logger.log(level, "gs://%s/%s: try %d failed (%s), again in %.0f s", bucket, name, tries, said, pause)
        time.sleep(pause)
    raise AssertionError("unreachable")


def _raise_if_lasting(error: Exception, bucket: str, name: str, permission: str) -> None:
    """Raise the explained error, if trying again would not help."""
    place = f"gs://{bucket}/{name}"
    if isinstance(error, api.GoogleAPICallError):
        code = error.code
        if code in (requests.codes.request_timeout, requests.codes.too_many_requests) or (code or 500) >= 500:
            return
        if code in (requests.codes.unauthorized, requests.codes.forbidden):
            raise _denied(place, bucket, permission, error.message) from error
        if code == requests.codes.not_found:
            if re.search(r"bucket does not exist", error.message or "", re.IGNORECASE):
                raise NotFound(f"{place}: bucket {bucket} does not exist") from error
            raise NotFound(f"{place}: is not there") from error
        raise WorldFailure(f"{place}: the service refused ({code}): {error.message}") from error
    if isinstance(error, auth.GoogleAuthError) and not isinstance(error, auth.TransportError):
        if getattr(error, "retryable", False):
            return
        raise _denied(place, bucket, permission, str(error)) from error


def _denied(place: str, bucket: str, permission: str, said: str | None) -> Denied:
    said = said or ""
    told = re.search(r"storage\.[a-zA-Z]+\.[a-zA-Z]+", said)
    asked = re.search(r"([\w.+-]+@[\w.-]+\w) does not have", said)
    return Denied(
        f"{place}: {asked[1] if asked else _account()} lacks {told[0] if told else permission} on bucket {bucket}; "
        f"grant it (roles/storage.objectUser has it) or use another account. The service said: {said.strip()}"
    )


def _account() -> str:
    """Name the account in whose name we ask."""
    credentials = _credentials(os.environ.get("STORAGE_EMULATOR_HOST"))
    if isinstance(credentials, AnonymousCredentials):
        return "nobody (no credentials were found: try `gcloud auth application-default login`)"
    for attribute in ("service_account_email", "signer_email", "account"):
        if email := getattr(credentials, attribute, None):
            return email
    return "the account of the default credentials"


def _said(error: Exception) -> str:
    """What went wrong, in a line: the service's own words, or who could not be reached and why."""
    code = getattr(error, "code", None)
    if told := unreachable(error):
        return told
    text = getattr(error, "message", None) or str(error) or type(error).__name__
    return f"{code} {text}"[:500] if isinstance(code, int) else text[:500]


def _told_pause_secs(error: Exception) -> float:
    """Return how long the service asked us to wait, 0 if it did not say."""
    answer = getattr(error, "response", None)
    told = answer.headers.get("Retry-After", "") if answer is not None else ""
    return min(float(told), _LONGEST_PAUSE_SECS) if told.isdecimal() else 0.0


@functools.cache
def _credentials(emulator: str | None) -> Any:
    if emulator:
        return AnonymousCredentials()
    try:
        return google.auth.default(scopes=_SCOPES)[0]
    except auth.DefaultCredentialsError:
        return AnonymousCredentials()  # enough to read public buckets; anything else will say who asked


@functools.cache
def _connection(process: int, emulator: str | None) -> tuple[google_storage.Client, AuthorizedSession]:
    """Make one client and one session for each process, because sockets must not be shared across a fork."""
    del process
    if emulator and "://" not in emulator:
        raise BadInput(f"STORAGE_EMULATOR_HOST {emulator!r}: must begin with http:// or https://")
    credentials = _credentials(emulator)
    # Nobody's credentials cannot be renewed: trying to would drop the refusal unread, and its connection unclosed.
    renewed_on = () if isinstance(credentials, AnonymousCredentials) else (requests.codes.unauthorized,)
    session = AuthorizedSession(credentials, refresh_status_codes=renewed_on)
    adapter = requests.adapters.HTTPAdapter(pool_connections=4, pool_maxsize=2 * NUM_THREADS)
    session.mount("https://", adapter)
    session.mount("http://", adapter)
    # Nothing we do belongs to a project, but the client would look for one in the environment and complain.
    return google_storage.Client(project="none", credentials=credentials), session


def _client() -> google_storage.Client:
    return _connection(os.getpid(), os.environ.get("STORAGE_EMULATOR_HOST"))[0]


def _session() -> AuthorizedSession:
    return _connection(os.getpid(), os.environ.get("STORAGE_EMULATOR_HOST"))[1]
