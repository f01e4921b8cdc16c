"""Lines of /proc/self/mountinfo as each filesystem's clients write them; `{path}` is the mount point."""

from __future__ import annotations

LOCAL_ROOT = "25 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda1 rw,errors=remount-ro"

NFS4 = (
    "80 25 0:52 / {path} rw,relatime shared:70 - nfs4 10.0.0.100:/export/output rw,vers=4.2,rsize=1048576,"
    "wsize=1048576,namlen=255,hard,proto=tcp,timeo=600,retrans=2,sec=sys,clientaddr=10.0.0.101,local_lock=none,"
    "addr=10.0.0.100"
)
NFS3 = (
    "81 25 0:53 / {path} rw,relatime shared:71 - nfs filer:/vol/output rw,vers=3,rsize=65536,wsize=65536,namlen=255,"
    "hard,proto=tcp,timeo=600,retrans=2,sec=sys,mountaddr=10.0.0.5,mountvers=3,mountport=635,mountproto=udp,"
    "local_lock=none,addr=10.0.0.5"
)
NFS3_NOLOCK = (
    "82 25 0:54 / {path} rw,noatime shared:72 - nfs filer:/vol/output rw,vers=3,rsize=65536,wsize=65536,namlen=255,"
    "soft,nolock,proto=tcp,timeo=50,retrans=2,sec=sys,mountaddr=10.0.0.5,mountvers=3,mountport=635,mountproto=tcp,"
    "local_lock=all,addr=10.0.0.5"
)
NFS4_READ_ONLY = (
    "83 25 0:55 / {path} ro,relatime shared:73 - nfs4 10.0.0.100:/export/output rw,vers=4.1,hard,proto=tcp,"
    "local_lock=none,addr=10.0.0.100"
)
EFS = (
    "84 25 0:56 / {path} rw,relatime shared:74 - nfs4 fs-0123456789abcdef0.efs.eu-west-1.amazonaws.com:/ rw,vers=4.1,"
    "rsize=1048576,wsize=1048576,namlen=255,hard,noresvport,proto=tcp,timeo=600,retrans=2,sec=sys,"
    "clientaddr=172.31.5.20,local_lock=none,addr=172.31.9.8"
)
EFS_TUNNEL = (
    "85 25 0:57 / {path} rw,relatime shared:75 - nfs4 127.0.0.1:/ rw,vers=4.1,rsize=1048576,wsize=1048576,namlen=255,"
    "hard,noresvport,proto=tcp,port=20049,timeo=600,retrans=2,sec=sys,clientaddr=127.0.0.1,local_lock=none,"
    "addr=127.0.0.1"
)
LUSTRE = (
    "86 25 0:58 / {path} rw,relatime shared:76 - lustre 10.0.1.1@tcp:10.0.1.2@tcp:/scratch rw,checksum,flock,"
    "nouser_xattr,lruresize,lazystatfs,nouser_fid2path,verbose,noencrypt"
)
LUSTRE_NO_FLOCK = (
    "87 25 0:59 / {path} rw,relatime shared:77 - lustre 10.0.1.1@o2ib:/scratch rw,checksum,user_xattr,lruresize,"
    "lazystatfs,nouser_fid2path,verbose"
)
LUSTRE_LOCALFLOCK = LUSTRE_NO_FLOCK.replace("checksum", "checksum,localflock")
CEPH = (
    "88 25 0:60 / {path} rw,relatime shared:78 - ceph 10.0.2.1:6789,10.0.2.2:6789,10.0.2.3:6789:/volumes/output rw,"
    "name=admin,secret=<hidden>,acl,wsize=16777216"
)
CEPH_NEW = "89 25 0:61 / {path} rw,relatime - ceph admin@b3acfc0d-575f-41d3-9c91-0e7ed3dbb3fa.cephfs=/ rw,acl,mon_addr=10.0.2.1:3300"  # noqa: E501
CEPH_FUSE = (
    "90 25 0:62 / {path} rw,nosuid,nodev,relatime shared:80 - fuse.ceph-fuse ceph-fuse rw,user_id=0,group_id=0,"
    "allow_other"
)
SSHFS = (
    "91 25 0:63 / {path} rw,nosuid,nodev,relatime shared:81 - fuse.sshfs ubuntu@10.0.0.100:/home/ubuntu/output rw,"
    "user_id=1000,group_id=1000"
)
BEEGFS = "92 25 0:64 / {path} rw,relatime shared:82 - beegfs beegfs_nodev rw,cfgFile=/etc/beegfs/beegfs-client.conf"
GPFS = "93 25 0:65 / {path} rw,relatime shared:83 - gpfs scratch rw"
SMB = (
    "94 25 0:66 / {path} rw,relatime shared:84 - cifs //10.0.0.9/output rw,vers=3.1.1,cache=strict,username=u,uid=1000,"
    "gid=1000,addr=10.0.0.9,file_mode=0755,dir_mode=0755,soft,nounix,serverino,mapposix,nobrl,rsize=4194304"
)
S3FS = "95 25 0:67 / {path} rw,nosuid,nodev,relatime shared:85 - fuse.s3fs s3fs rw,user_id=0,group_id=0,allow_other"
OVERLAY = (
    "96 25 0:68 / {path} rw,relatime - overlay overlay rw,lowerdir=/var/lib/docker/overlay2/l/A:/var/lib/docker/"
    "overlay2/l/B,upperdir=/var/lib/docker/overlay2/c/diff,workdir=/var/lib/docker/overlay2/c/work"
)
TMPFS = "97 25 0:69 / {path} rw,nosuid,nodev shared:86 - tmpfs tmpfs rw,size=6553600k,nr_inodes=1638400"
XFS = "98 25 259:1 / {path} rw,noatime shared:87 - xfs /dev/nvme1n1 rw,attr2,inode64,logbufs=8,logbsize=32k,noquota"
BIND_OF_EXT4 = "99 25 254:0 /srv/output {path} rw,relatime shared:1 - ext4 /dev/vda1 rw,errors=remount-ro"
VIRTIOFS = "100 25 0:70 / {path} rw,relatime - virtiofs output rw"
RCLONE = "102 25 0:72 / {path} rw,nosuid,nodev,relatime - fuse.rclone store:bucket rw,user_id=0,group_id=0"
GLUSTER = "103 25 0:73 / {path} rw,relatime - fuse.glusterfs server:/volume rw,user_id=0,group_id=0,allow_other"
BINDFS = "104 25 0:74 / {path} rw,nosuid,nodev,relatime - fuse /srv/output rw,user_id=0,group_id=0,allow_other"
MERGERFS = "105 25 0:75 / {path} rw,relatime - fuse.mergerfs disk1:disk2 rw,user_id=0,group_id=0,allow_other"
GOCRYPTFS = "106 25 0:76 / {path} rw,nosuid,nodev,relatime - fuse.gocryptfs /srv/encrypted rw,user_id=0,group_id=0"
UNHEARD_OF = "101 25 0:71 / {path} rw,relatime - newfs somewhere rw"
