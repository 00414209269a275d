#!/usr/bin/env bash
# Boots systemd as PID 1 over a throw-away copy of this machine's files. usage: boot.sh CGROUP UNITS
#
# Run by: unshare --fork --pid --mount --net --kill-child boot.sh CGROUP UNITS
# Root is an overlay whose writes go to memory, /run, /tmp and /var/tmp are empty, the cgroup tree is a subtree of
# CGROUP, the network is a loopback of its own, and the only units are those of the folder UNITS and what is installed
# inside. So nothing outside is started, changed or cleaned up.
set -euo pipefail
cgroup="$1" units="$2"
echo $$ > "$cgroup/cgroup.procs"
mount --make-rprivate /
mount -t tmpfs tmpfs /mnt
mkdir /mnt/upper /mnt/work /mnt/root
mount -t overlay overlay -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work /mnt/root
root=/mnt/root
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount --rbind /sys "$root/sys"
unshare --cgroup mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
mount -t tmpfs -o mode=755 tmpfs "$root/run"
mkdir "$root/run/units" "$root/run/lock"
cp -r "$units"/* "$root/run/units/"
mount -t tmpfs -o mode=755 tmpfs "$root/var/log"
mount -t tmpfs -o mode=755 tmpfs "$root/etc/systemd/system"
for folder in tmp var/tmp; do mount -t tmpfs -o mode=1777 tmpfs "$root/$folder"; done
exec env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin container=inferengine-test SYSTEMD_UNIT_PATH=/etc/systemd/system:/run/units \
    unshare --cgroup chroot "$root" /lib/systemd/systemd --system --unit=boot.target --show-status=0 --log-target=console
