"""``/v1/files``: inputs of batches, and what batches have made, as OpenAI's API has them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec
from litestar import delete, get, post
from litestar.datastructures import UploadFile
from litestar.enums import RequestEncodingType
from litestar.params import Body
from litestar.response import Stream

from tokenmill.producer.batches.files import File, FileTooLargeError
from tokenmill.producer.batches.office import Office
from tokenmill.producer.gateway.desk import Call
from tokenmill.producer.gateway.errors import ApiError
from tokenmill.producer.gateway.specification import ERRORS

_PIECE = 1 << 16


class FileForm(msgspec.Struct, kw_only=True):
    """The parts of an upload."""

    file: UploadFile
    purpose: Literal["batch"]


class Files(msgspec.Struct, kw_only=True):
    """The files of a caller."""

    data: list[File]
    object: str = "list"
    has_more: bool = False


class Deleted(msgspec.Struct, kw_only=True):
    """A file that is gone."""

    id: str
    deleted: bool = True
    object: str = "file"


Upload = Annotated[FileForm, Body(media_type=RequestEncodingType.MULTI_PART)]


@post("/v1/files", status_code=200, responses=ERRORS, tags=["OpenAI"])
async def upload_file(request: Call, office: Office, data: Upload) -> File:
    """Send the input of a batch: a file of JSON lines."""
    source = data.file.file

    def pieces() -> Iterator[bytes]:
        source.seek(0)
        return iter(lambda: source.read(_PIECE), b"")

    try:
        return await asyncio.to_thread(
            lambda: office.files.add(request.user.name, data.file.filename, data.purpose, pieces())
        )
    except FileTooLargeError as error:
        raise ApiError(413, str(error), param="file") from None


@get("/v1/files", responses=ERRORS, tags=["OpenAI"])
async def list_files(request: Call, office: Office) -> Files:
    """List the caller's files, the newest first."""
    return Files(data=await asyncio.to_thread(office.files.list, request.user.name))


@get("/v1/files/{file_id:str}", responses=ERRORS, tags=["OpenAI"])
async def show_file(request: Call, office: Office, file_id: str) -> File:
    """Describe a file."""
    return await _find(request, office, file_id)


@get("/v1/files/{file_id:str}/content", responses=ERRORS, tags=["OpenAI"])
async def read_file(request: Call, office: Office, file_id: str) -> Stream:
    """Give back the content of a file."""
    file = await _find(request, office, file_id)
    return Stream(office.files.content(request.user.name, file.id), media_type="application/jsonl")


@delete("/v1/files/{file_id:str}", status_code=200, responses=ERRORS, tags=["OpenAI"])
async def delete_file(request: Call, office: Office, file_id: str) -> Deleted:
    """Forget a file."""
    file = await _find(request, office, file_id)
    await asyncio.to_thread(office.files.remove, request.user.name, file.id)
    return Deleted(id=file.id)


async def _find(request: Call, office: Office, file_id: str) -> File:
    file = await asyncio.to_thread(office.files.find, request.user.name, file_id)
    if file is None:
        raise ApiError(404, f"no file `{file_id[:64]}`", code="no_such_file")
    return file
