/* The beginning of the one file: unpacks what is behind it, once, and becomes the server.
 *
 * Where it unpacks, the first that can be written: $FASTSERVE_UNPACK_DIRECTORY (then no other),
 * $XDG_CACHE_HOME/fastserve, $HOME/.cache/fastserve, /var/tmp/fastserve-UID, /tmp/fastserve-UID,
 * /dev/shm/fastserve-UID. A directory there is named after the digest of what is in it. It is made
 * under another name and renamed when it is whole: so it is whole if it exists, and starts that
 * race do no harm. Only directories that are our own, and that nobody else can write to, are used.
 *
 * pack.py has the format. Exit code 1: it could not be unpacked; the message says why.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAGIC "fastserve-file-1"
#define PROGRAM "fastserve"

struct entry {
    char kind;
    char padding[3];
    uint32_t mode;
    uint32_t path_length;
    uint64_t length;
} __attribute__((packed));

struct trailer {
    uint64_t offset;
    uint64_t number;
    unsigned char digest[16];
    char magic[16];
} __attribute__((packed));

static const char *self = "/proc/self/exe";

static void die(const char *what) {
    fprintf(stderr, "fastserve: %s: %s\n", what, strerror(errno));
    exit(1);
}

static void read_all(int fd, void *to, size_t length) {
    char *at = to;
    while (length > 0) {
        ssize_t got = read(fd, at, length);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) {
            if (got == 0) errno = EIO;
            die("this file is not whole");
        }
        at += got;
        length -= (size_t)got;
    }
}

static int copy(int from, int to, uint64_t length) {
    while (length > 0) {
        ssize_t done = sendfile(to, from, NULL, length > (1u << 30) ? (1u << 30) : (size_t)length);
        if (done < 0 && errno == EINTR) continue;
        if (done == 0) errno = EIO;
        if (done <= 0) return -1;
        length -= (uint64_t)done;
    }
    return 0;
}

/* One entry, under the directory `base`. Returns -1 with errno: the disk may be full. */
static int unpack_entry(int fd, int base) {
    struct entry entry;
    char path[PATH_MAX], link[PATH_MAX];
    read_all(fd, &entry, sizeof entry);
    if (entry.path_length >= sizeof path) {
        errno = ENAMETOOLONG;
        return -1;
    }
    read_all(fd, path, entry.path_length);
    path[entry.path_length] = 0;
    if (entry.kind == 'D') return mkdirat(base, path, 0700);
    if (entry.kind == 'L') {
        if (entry.length >= sizeof link) {
            errno = ENAMETOOLONG;
            return -1;
        }
        read_all(fd, link, entry.length);
        link[entry.length] = 0;
        return symlinkat(link, base, path);
    }
    int out = openat(base, path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, entry.mode & 0700);
    if (out < 0) return -1;
    int failed = copy(fd, out, entry.length);
    /* close(2) may be the one to tell that the disk is full. */
    return close(out) < 0 || failed ? -1 : 0;
}

static int remove_one(const char *path, const struct stat *status, int kind, struct FTW *walk) {
    (void)status, (void)kind, (void)walk;
    return remove(path);
}

static void remove_tree(const char *path) {
    int kept = errno;
    nftw(path, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    errno = kept;
}

/* Whether `path` is a directory of ours that no one else can write to; it is made if need be. */
static int is_ours(const char *path) {
    struct stat status;
    if (mkdir(path, 0700) < 0 && errno != EEXIST) return 0;
    if (lstat(path, &status) < 0) return 0;
    if (!S_ISDIR(status.st_mode) || status.st_uid != geteuid() || status.st_mode & 022) {
        errno = EPERM;
        return 0;
    }
    return access(path, W_OK | X_OK) == 0;
}

/* Unpack into `base`, as `name`. Returns 0 if it is there, also if another was faster. */
static int unpack(int fd, const struct trailer *trailer, const char *base, const char *name) {
    char whole[PATH_MAX], part[PATH_MAX];
    if (snprintf(whole, sizeof whole, "%s/%s", base, name) >= (int)sizeof whole ||
        snprintf(part, sizeof part, "%s/.unpacking-XXXXXX", base) >= (int)sizeof part) {
        errno = ENAMETOOLONG;
        return -1;
    }
    if (access(whole, F_OK) == 0) return 0;
    if (!mkdtemp(part)) return -1;
    int directory = open(part, O_PATH | O_DIRECTORY | O_CLOEXEC);
    int failed = directory < 0 || lseek(fd, (off_t)trailer->offset, SEEK_SET) < 0;
    for (uint64_t at = 0; at < trailer->number && !failed; at++)
        failed = unpack_entry(fd, directory) < 0;
    if (directory >= 0) close(directory);
    if (!failed && rename(part, whole) < 0) failed = errno != EEXIST && errno != ENOTEMPTY;
    remove_tree(part); /* what failed, or came second; nothing if it was renamed */
    return failed ? -1 : 0;
}

/* The places, best first; NULL is the end of them. */
static const char *place(int number, const char *given, char *buffer, size_t size) {
    const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    static const char *temporary[] = {"/var/tmp", "/tmp", "/dev/shm"};
    *buffer = 0;
    if (given && *given) {
        snprintf(buffer, size, "%s", given);
        return number == 0 ? buffer : NULL;
    }
    if (number == 0) {
        if (cache && *cache == '/') {
            mkdir(cache, 0700);
            snprintf(buffer, size, "%s/fastserve", cache);
        }
    } else if (number == 1) {
        if (home && *home == '/') {
            snprintf(buffer, size, "%s/.cache", home);
            mkdir(buffer, 0700);
            snprintf(buffer, size, "%s/.cache/fastserve", home);
        }
    } else if (number < 5) {
        snprintf(buffer, size, "%s/fastserve-%u", temporary[number - 2], (unsigned)geteuid());
    } else {
        return NULL;
    }
    return buffer;
}

int main(int argc, char **argv) {
    struct trailer trailer;
    char base[PATH_MAX], program[PATH_MAX + 64], name[64] = "unpacked-";
    int fd = open(self, O_RDONLY | O_CLOEXEC);
    (void)argc;
    if (fd < 0) die(self);
    if (lseek(fd, -(off_t)sizeof trailer, SEEK_END) < 0) die(self);
    read_all(fd, &trailer, sizeof trailer);
    if (memcmp(trailer.magic, MAGIC, sizeof trailer.magic)) {
        errno = EINVAL;
        die("this file is not whole");
    }
    for (int at = 0; at < 16; at++) sprintf(name + strlen(name), "%02x", trailer.digest[at]);
    const char *variable = getenv("FASTSERVE_UNPACK_DIRECTORY");
    const char *given = variable ? strdup(variable) : NULL;
    for (int number = 0; place(number, given, base, sizeof base); number++) {
        if (!*base) continue;
        if (!is_ours(base) || unpack(fd, &trailer, base, name) < 0) {
            fprintf(stderr, "fastserve: cannot unpack into %s: %s\n", base, strerror(errno));
            continue;
        }
        /* The server's settings are variables too, and this is none of them. */
        unsetenv("FASTSERVE_UNPACK_DIRECTORY");
        snprintf(program, sizeof program, "%s/%s/" PROGRAM, base, name);
        execv(program, argv);
        /* It may lie on a file system from which nothing is executed. */
        fprintf(stderr, "fastserve: cannot run %s: %s\n", program, strerror(errno));
    }
    fputs("fastserve: set FASTSERVE_UNPACK_DIRECTORY to a directory of yours\n", stderr);
    return 1;
}
