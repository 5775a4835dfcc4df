#!/bin/sh
# What `make test-deploy` starts: a root file system of Debian 12 with ipcsync in it, and the image of the Containerfile over
# a stand-in for its base. Needs root, and of Debian's packages debootstrap, systemd-container, podman, buildah and runc.
#   tests/deploy/prepare.sh DIRECTORY PYTHON
set -eu
out=$1 python=$2 root=$1/root wheels=$1/wheels
mkdir -p "$out"
[ -e "$root/etc/debian_version" ] || debootstrap --variant=minbase \
  --include=systemd,systemd-sysv,dbus,dbus-user-session,libpam-systemd,python3,python3-venv bookworm "$root"

# pip reaches no index in there: it gets the wheels for Debian's Python, and what builds ipcsync's own.
"$python" -m pip download --quiet --dest "$wheels" --only-binary :all: --python-version 3.11 \
  "click>=8.2" "cuda-bindings>=12.9.1,<14" "msgspec>=0.21" "pyzmq>=26.2" "rich>=13" \
  "prometheus-client>=0.20" "starlette>=0.37" "uvicorn>=0.29" "nats-py>=2.9" "uvloop>=0.21" "hatchling>=1.26"
rm -rf "$root/wheels" "$root/src" "$root/opt/ipcsync"
mkdir -p "$root/src"
cp -r "$wheels" "$root/wheels"
printf '[global]\nno-index = true\nfind-links = /wheels\n' > "$root/etc/pip.conf"
ln -sf /usr/bin/python3 "$root/usr/local/bin/python"

# The image first, over a base without ipcsync.
storage="$out/containers"
mkdir -p "$storage"
cat > "$out/storage.conf" <<END
[storage]
driver = "overlay"
graphroot = "$storage/graph"
runroot = "$storage/run"
END
export CONTAINERS_STORAGE_CONF="$out/storage.conf"
tar -C "$root" -c --exclude './proc/*' --exclude './sys/*' . | podman import --quiet - localhost/python:3.12-slim
buildah bud --quiet --format docker --isolation chroot --pull-never --tag ipcsync:local \
  --file deploy/container/Containerfile --ignorefile deploy/container/Containerfile.dockerignore .

cp -r pyproject.toml hatch_build.py README.md LICENSE ipcsync services "$root/src"
env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin chroot "$root" sh -euc '
  id alice >/dev/null 2>&1 || useradd --create-home alice
  id bob >/dev/null 2>&1 || useradd --create-home bob
  python3 -m venv /opt/ipcsync
  cd /src && /opt/ipcsync/bin/pip install --quiet ".[observer]"'
mkdir -p "$root/opt/ipcsync/share"
cp deploy/container/worker.py "$root/opt/ipcsync/share/worker.py"
