"""A stand-in for the Hugging Face Hub: models, commits, large files, branches, tags, private repositories.

Written from what huggingface_hub sends and expects; all is kept in memory. It has one user, and is as strict as the
Hub where a test may rely on it: writing needs the token, a private repository is not there without it, a large file is
taken only where a batch request has allowed it, and a commit is made whole or not at all.
"""

import base64
import hashlib
import json
import re
import secrets
import socket
import threading
import urllib.parse
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import yaml
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from huggingface_hub.repocard_data import model_index_to_eval_results


TASKS = ["feature-extraction", "fill-mask", "multiple-choice", "question-answering", "sentence-similarity"]
TASKS += ["text-classification", "token-classification", "zero-shot-classification"]


def card_errors(card):
    """What is wrong with the YAML metadata of a model card; the Hub itself only warns where there is none."""
    block = REGEX_YAML_BLOCK.search(card)
    if block is None:
        return ["there is no metadata"]
    try:
        metadata = yaml.safe_load(block[2])
    except yaml.YAMLError as error:
        return [f"the metadata is not YAML: {error}"]
    if not isinstance(metadata, dict):
        return ["the metadata is not a mapping"]
    errors = []
    for name in ("license", "library_name", "pipeline_tag"):
        if not isinstance(metadata.get(name, ""), str):
            errors.append(f"{name} is not a string")
    for name in ("base_model", "datasets", "language", "metrics", "tags"):
        values = metadata.get(name, [])
        if not all(isinstance(value, str) for value in (values if isinstance(values, list) else [values])):
            errors.append(f"{name} is not a string or a list of strings")
    if metadata.get("pipeline_tag", "fill-mask") not in TASKS:
        errors.append(f"pipeline_tag is unknown: {metadata['pipeline_tag']}")
    if "model-index" in metadata:
        try:
            model_index_to_eval_results(metadata["model-index"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            errors.append(f"model-index is malformed: {error!r}")
    return errors


@dataclass
class File:
    """A file of a commit; `sha256` is None where the content lies in git itself."""

    content: bytes
    sha256: str | None = None

    @property
    def name(self):
        """What the Hub calls the content: its SHA-256, or git's name for it."""
        return self.sha256 or hashlib.sha1(b"blob %d\0" % len(self.content) + self.content).hexdigest()


@dataclass
class Repository:
    """The commits of a model and what names them."""

    private: bool = False
    commits: dict[str, dict[str, File]] = field(default_factory=dict)  # hash -> path -> file
    branches: dict[str, str] = field(default_factory=dict)  # name -> hash
    tags: dict[str, str] = field(default_factory=dict)

    def commit(self, branch, files):
        """Makes `files` the content of `branch`."""
        commit = secrets.token_hex(20)
        self.commits[commit] = files
        self.branches[branch] = commit
        return commit


class Refusal(Exception):  # noqa: N818
    """An answer that is an error; `code` is what huggingface_hub chooses its exception by."""

    def __init__(self, status, message, code="", **body):
        self.status = status
        self.body = {"error": message, **body}
        self.headers = {"X-Error-Message": message, "X-Error-Code": code}


class Hub(ThreadingHTTPServer):
    """The server and all that it holds; it answers from the moment on that it is made, until `shutdown`."""

    daemon_threads = True

    def __init__(self, token="hf_right", user="tester"):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.token = token
        self.user = user
        self.repositories = {}  # "owner/name" -> Repository
        self.large_files = {}  # SHA-256 -> content
        self.upload_keys = {}  # key -> SHA-256 of the one file that may be sent with it
        self.requests = []  # "METHOD /path"
        self.drops = []  # beginnings of requests, each of which is cut off in the middle once
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    """Answers one request; `ROUTES` says which function does."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass  # the log is `requests`

    def answer(self):
        """Sends what the function of the route returns, or the refusal that it raises."""
        request = f"{self.command} {self.path.partition('?')[0]}"
        self.server.requests.append(request)
        length = int(self.headers.get("Content-Length") or 0)
        for beginning in self.server.drops:
            if request.startswith(beginning):
                self.server.drops.remove(beginning)
                self.rfile.read(length // 2)
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True
                return
        self.body = self.rfile.read(length)
        self.more_headers = {}
        try:
            authorization = self.headers.get("Authorization")
            if authorization not in (None, f"Bearer {self.server.token}"):
                raise Refusal(401, "Invalid credentials in Authorization header")
            self.has_token = authorization is not None
            for pattern, function in ROUTES.items():
                match = re.fullmatch(pattern, request)
                if match:
                    self.send(200, function(self, *map(urllib.parse.unquote, match.groups())))
                    return
            raise Refusal(404, f"no route for {request}")
        except Refusal as refusal:
            self.more_headers |= refusal.headers
            self.send(refusal.status, refusal.body)

    do_GET = do_HEAD = do_POST = do_PUT = answer  # noqa: N815

    def send(self, status, content):
        """Sends bytes as they are and all else as JSON."""
        if not isinstance(content, bytes):
            content = json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": len(content), **self.more_headers}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def repository(self, name, write=False):
        """The repository, for reading or writing; one that may not be seen is not there."""
        repository = self.server.repositories.get(name)
        if repository is None or (repository.private and not self.has_token):
            raise Refusal(404 if self.has_token else 401, "Repository not found", "RepoNotFound")
        if write:
            self.need_token()
        return repository

    def need_token(self):
        if not self.has_token:
            raise Refusal(401, "Invalid username or password.")

    def files(self, name, revision):
        """The hash and the files of the commit that a branch, a tag or a hash names."""
        repository = self.repository(name)
        commit = (repository.branches | repository.tags).get(revision, revision)
        if commit not in repository.commits:
            raise Refusal(404, "Invalid rev id", "RevisionNotFound")
        return commit, repository.commits[commit]

    # ---- what there is

    def information(self, name, revision="main"):
        commit, files = self.files(name, revision)
        private = self.repository(name).private
        return {"id": name, "sha": commit, "private": private, "siblings": [{"rfilename": path} for path in files]}

    def tree(self, name, revision, folder=""):
        entries = []
        for path, file in self.files(name, revision)[1].items():
            if path.startswith(f"{folder}/" if folder else ""):
                entries.append({"type": "file", "path": path, "oid": file.name, "size": len(file.content)})
        if not entries:
            raise Refusal(404, "Entry not found", "EntryNotFound")
        return entries

    def resolve(self, name, revision, path):
        commit, files = self.files(name, revision)
        self.more_headers["X-Repo-Commit"] = commit
        if path not in files:
            raise Refusal(404, "Entry not found", "EntryNotFound")
        self.more_headers["ETag"] = f'"{files[path].name}"'
        return files[path].content

    # ---- what changes it

    def create(self):
        self.need_token()
        wanted = json.loads(self.body)
        name = f"{wanted.get('organization') or self.server.user}/{wanted['name']}"
        url = f"{self.server.url}/{name}"
        if name in self.server.repositories:
            raise Refusal(409, "You already created this model repo", url=url)
        repository = self.server.repositories[name] = Repository(private=wanted.get("visibility") == "private")
        repository.commit("main", {".gitattributes": File(b"*.safetensors filter=lfs\n")})
        return {"url": url, "name": name}

    def validate(self):
        errors = [{"message": message} for message in card_errors(json.loads(self.body)["content"])]
        if errors:
            raise Refusal(400, "Invalid metadata", errors=errors)
        return {"errors": []}

    def preupload(self, name, branch):
        self.repository(name, write=True)
        old = self.files(name, branch)[1]
        answers = []
        for path in [file["path"] for file in json.loads(self.body)["files"]]:
            mode = "lfs" if path.endswith((".safetensors", ".bin")) else "regular"
            known = {"oid": old[path].name} if path in old else {}  # what is the same is not sent again
            answers.append({"path": path, "uploadMode": mode, "shouldIgnore": False, **known})
        return {"files": answers}

    def batch(self, name):
        self.repository(name, write=True)
        objects = json.loads(self.body)["objects"]
        for wanted in objects:
            if wanted["oid"] not in self.server.large_files:
                key = secrets.token_hex(8)
                self.server.upload_keys[key] = wanted["oid"]
                wanted["actions"] = {"upload": {"href": f"{self.server.url}/_large/{key}"}}
        return {"transfer": "basic", "objects": objects}

    def upload(self, key):
        sha256 = hashlib.sha256(self.body).hexdigest()
        if self.server.upload_keys.get(key) != sha256:
            raise Refusal(403, "not what this address was given out for")
        self.server.large_files[sha256] = self.body
        return {}

    def commit(self, name, branch):
        repository = self.repository(name, write=True)
        if branch not in repository.branches:
            raise Refusal(404, "Invalid rev id", "RevisionNotFound")
        files = dict(self.files(name, branch)[1])
        for operation in map(json.loads, self.body.splitlines()):
            value = operation["value"]
            if operation["key"] == "file":
                files[value["path"]] = File(base64.b64decode(value["content"]))
            elif operation["key"] == "lfsFile":
                if value["oid"] not in self.server.large_files:
                    raise Refusal(400, "LFS pointer pointed to a file that does not exist")
                files[value["path"]] = File(self.server.large_files[value["oid"]], value["oid"])
        commit = repository.commit(branch, files)
        return {"commitOid": commit, "commitUrl": f"{self.server.url}/{name}/commit/{commit}"}

    def create_branch(self, name, branch):
        branches = self.repository(name, write=True).branches
        branches.setdefault(branch, branches["main"])
        return {}

    def create_tag(self, name, revision):
        tags = self.repository(name, write=True).tags
        tags[json.loads(self.body)["tag"]] = self.files(name, revision)[0]
        return {}

    def drop(self):
        """For the tests, which may run in another process: what is to be cut off from now on."""
        self.server.drops[:] = json.loads(self.body)
        return {}


REPOSITORY = "([^/]+/[^/]+)"
ROUTES = {  # a pattern of the method and the path, whose groups are the function's arguments
    f"GET /api/models/{REPOSITORY}": Handler.information,
    f"GET /api/models/{REPOSITORY}/revision/([^/]+)": Handler.information,
    f"GET /api/models/{REPOSITORY}/tree/([^/]+)": Handler.tree,
    f"GET /api/models/{REPOSITORY}/tree/([^/]+)/(.+)": Handler.tree,
    f"(?:GET|HEAD) /{REPOSITORY}/resolve/([^/]+)/(.+)": Handler.resolve,
    "POST /api/repos/create": Handler.create,
    "POST /api/validate-yaml": Handler.validate,
    f"POST /api/models/{REPOSITORY}/preupload/([^/]+)": Handler.preupload,
    rf"POST /{REPOSITORY}\.git/info/lfs/objects/batch": Handler.batch,
    "PUT /_large/(.+)": Handler.upload,
    f"POST /api/models/{REPOSITORY}/commit/([^/]+)": Handler.commit,
    f"POST /api/models/{REPOSITORY}/branch/([^/]+)": Handler.create_branch,
    f"POST /api/models/{REPOSITORY}/tag/([^/]+)": Handler.create_tag,
    "PUT /_drops": Handler.drop,
}
