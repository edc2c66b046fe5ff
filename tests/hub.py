"""A hub of one's own for tests: of the Hugging Face hub's interface what pushing and loading use.

Files are really received, weights by LFS as on the hub, kept in memory, and served by commit.
"""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "hf_test"


class Hub(ThreadingHTTPServer):
    """Answers on `endpoint` while used as a context."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.endpoint = f"http://127.0.0.1:{self.server_port}"
        self.repositories: dict[
            str, list[dict[str, bytes]]
        ] = {}  # of each the commits, file by file
        self.private: dict[str, bool] = {}
        self.objects: dict[str, bytes] = {}  # by LFS, by SHA-256

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def reply(self, content, status=200, **headers):
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self):
        path = self.path.partition("?")[0]
        for pattern, answer in (
            (r"/api/models/(.+/.+)/revision/main", self.about),
            (r"/api/models/(.+/.+)/tree/(\w+)", self.tree),
            (r"/(.+/.+)/resolve/(\w+)/(.+)", self.file),
        ):
            if found := re.fullmatch(pattern, path):
                if found[1] in self.server.repositories:
                    return answer(*found.groups())
                return self.reply(
                    {"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound"
                )
        self.reply({"error": path}, 404)

    do_HEAD = do_GET

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.reply({"error": "Invalid username or password."}, 401)
        for pattern, answer in (
            (r"/api/repos/create", self.create),
            (r"/api/validate-yaml", self.validate),
            (r"/api/models/(.+/.+)/preupload/main", self.preupload),
            (r"/(.+/.+)\.git/info/lfs/objects/batch", self.lfs),
            (r"/api/models/(.+/.+)/commit/main", self.commit),
        ):
            if found := re.fullmatch(pattern, self.path.partition("?")[0]):
                return answer(body, *found.groups())
        self.reply({"error": self.path}, 404)

    def do_PUT(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.objects[hashlib.sha256(body).hexdigest()] = body
        self.reply({})

    def create(self, body):
        asked = json.loads(body)
        name = f"{asked['organization']}/{asked['name']}"
        url = f"{self.server.endpoint}/{name}"
        if name in self.server.repositories:
            return self.reply({"error": "You already created this model repo", "url": url}, 409)
        self.server.repositories[name] = []
        self.server.private[name] = asked.get("visibility") == "private"
        self.reply({"url": url})

    def validate(self, body):
        front = json.loads(body)["content"].split("---")[1]
        base = re.search(r"^base_model: (.*)$", front, re.MULTILINE)
        if base and not re.fullmatch(r"[\w.-]+/[\w.-]+", base[1]):
            return self.reply({"errors": [{"message": f"base_model {base[1]} is no hub id"}]}, 400)
        self.reply({"errors": [], "warnings": []})

    def preupload(self, body, name):
        self.reply(
            {
                "files": [
                    {
                        "path": file["path"],
                        "shouldIgnore": False,
                        "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                    }
                    for file in json.loads(body)["files"]
                ]
            }
        )

    def lfs(self, body, name):
        self.reply(
            {
                "transfer": "basic",
                "objects": [
                    {
                        **wanted,
                        "actions": {
                            "upload": {"href": f"{self.server.endpoint}/upload/{wanted['oid']}"}
                        },
                    }
                    for wanted in json.loads(body)["objects"]
                ],
            },
            Content_Type="application/vnd.git-lfs+json",
        )

    def commit(self, body, name):
        commits = self.server.repositories[name]
        files = dict(commits[-1]) if commits else {}
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        commits.append(files)
        oid = self.sha(name)
        self.reply(
            {
                "success": True,
                "commitOid": oid,
                "commitUrl": f"{self.server.endpoint}/{name}/commit/{oid}",
            }
        )

    def sha(self, name):
        return f"{len(self.server.repositories[name]):040x}"

    def about(self, name):
        self.reply(
            {
                "id": name,
                "sha": self.sha(name),
                "private": self.server.private[name],
                "tags": [],
                "siblings": [{"rfilename": path} for path in self.server.repositories[name][-1]],
            }
        )

    def tree(self, name, sha):
        commits = [{}, *self.server.repositories[name]]
        self.reply(
            [
                {
                    "type": "file",
                    "path": path,
                    "size": len(content),
                    "oid": hashlib.sha1(content).hexdigest(),
                }
                for path, content in commits[-1 if sha == "main" else int(sha, 16)].items()
            ]
        )

    def file(self, name, sha, path):
        files = self.server.repositories[name][int(sha, 16) - 1]
        if path not in files:
            return self.reply({"error": "Entry not found"}, 404, X_Error_Code="EntryNotFound")
        self.reply(
            files[path], X_Repo_Commit=sha, ETag=f'"{hashlib.sha1(files[path]).hexdigest()}"'
        )
