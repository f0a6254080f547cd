"""Storages for captures and tables, as servers of this machine: S3 (moto's) and HDFS (Hadoop's MiniDFSCluster)."""

import os
import subprocess
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from kproxy.capture.formats.storage import Storage, options_of

HDFS = Path(__file__).parents[1] / ".cache/hdfs"  # see ./dev
KEYS = {"AWS_ACCESS_KEY_ID": "kproxy", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}


class Bucket:
    """A server with one bucket."""

    def __init__(self, monkeypatch):
        import boto3
        from moto.server import ThreadedMotoServer

        for key, value in KEYS.items():
            monkeypatch.setenv(key, value)
        self.server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        self.server.start()
        host, port = self.server.get_host_and_port()
        self.url = f"http://{host}:{port}"
        self.client = boto3.client("s3", endpoint_url=self.url)
        self.client.create_bucket(Bucket="captures")

    def put(self, key, data):
        self.client.put_object(Bucket="captures", Key=key, Body=data)
        return f"s3://captures/{key}"

    def goes(self):
        """Nobody answers at its address, until it comes again with all that it held."""
        self.server.stop()

    def comes(self):
        from moto.server import ThreadedMotoServer

        host, port = self.url.removeprefix("http://").split(":")
        self.server = ThreadedMotoServer(host, int(port), verbose=False)
        self.server.start()

    @property
    def storage(self):
        return Storage(options_of([f"endpoint_url={self.url}", "key=kproxy", "secret=secret"]))


@contextmanager
def hdfs(folder):
    """The address and the HTTP address of a NameNode, whose blocks lie in `folder`."""
    jars = [*HDFS.glob("*.jar"), *(Path(find_spec("pyspark").origin).parent / "jars").glob("*.jar")]
    assert len(jars) > 1, "./dev test fetches HDFS"
    path = os.pathsep.join(map(str, jars))
    command = ["java", "-cp", path, str(Path(__file__).with_name("MiniDfs.java")), str(folder)]
    with (folder / "log.txt").open("w") as log:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            for line in process.stdout:
                if line.startswith("ready "):
                    _, address, http = line.split()
                    yield f"hdfs://{address}", f"webhdfs://{http}"
                    return
            raise RuntimeError((folder / "log.txt").read_text()[-2000:])
        finally:
            process.stdin.close()
            process.kill()
            process.wait()
