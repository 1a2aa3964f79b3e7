/* Counts the calls of this process that change files under some folder, and sends it a signal right after the nth.

   Loaded with LD_PRELOAD. A call counts when it is done and has succeeded. SIGKILL: the process ends as if the machine
   had been switched off at that line. SIGINT: the stop button. SIGSTOP: a kernel that is slow, while another takes over.
   With `torn` the nth call, where it writes, writes half of its bytes only. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static char root[PATH_MAX];
static atomic_long calls;
static long point;
static int sent, torn, told = -1;

/* nth: 0 sends no signal, and has all calls written to `said`; else the nth one is. said: a descriptor; -1: none. */
void crash_arm(const char *folder, long nth, int number, int half, int said) {
    atomic_store(&calls, 0);
    point = nth, sent = number, torn = half, told = said;
    snprintf(root, sizeof root, "%s", folder);
}

long crash_disarm(void) {
    root[0] = 0;
    return atomic_load(&calls);
}

static int in_root(const char *path) { return path && root[0] && strncmp(path, root, strlen(root)) == 0; }

static int path_of(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, PATH_MAX - 1);
    path[size < 0 ? 0 : size] = 0;
    return in_root(path);
}

static int file_of(int fd, char *path) { return root[0] && path_of(fd, path); }

static int at(int folder, const char *name, char *path) {
    if (!root[0] || !name) return 0;
    if (name[0] == '/') return snprintf(path, PATH_MAX, "%s", name), in_root(path);
    char base[PATH_MAX] = "";
    if (folder == AT_FDCWD) { if (!getcwd(base, sizeof base)) return 0; }
    else path_of(folder, base);
    snprintf(path, PATH_MAX, "%.2000s/%.2000s", base, name);
    return in_root(path);
}

static void done(const char *call, const char *path) {
    long number = atomic_fetch_add(&calls, 1) + 1;
    if (point && number != point) return;
    char line[PATH_MAX + 64];
    int size = snprintf(line, sizeof line, "%ld %s %s\n", number, call, path);
    if (told >= 0) syscall(SYS_write, told, line, size);
    if (!point) return;
    kill(getpid(), sent);
    if (sent == SIGKILL) for (;;) pause();
}

#define REAL(name) static __typeof__(name) *real; if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)
#define NTH_WRITE(size) (torn && (size) > 1 && atomic_load(&calls) + 1 == point)

ssize_t write(int fd, const void *data, size_t size) {
    REAL(write);
    char path[PATH_MAX];
    if (!file_of(fd, path)) return real(fd, data, size);
    ssize_t wrote = real(fd, data, NTH_WRITE(size) ? size / 2 : size);
    if (wrote >= 0) done("write", path);
    return wrote;
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    REAL(writev);
    char path[PATH_MAX];
    ssize_t wrote = real(fd, parts, count);
    if (wrote >= 0 && file_of(fd, path)) done("writev", path);
    return wrote;
}

#define OPENS(name, FOLDER, ARGUMENTS, ...)                                          \
    {                                                                                \
        REAL(name);                                                                  \
        char whole[PATH_MAX];                                                        \
        mode_t mode = 0;                                                             \
        if (flags & (O_CREAT | O_TMPFILE)) {                                         \
            va_list list;                                                            \
            va_start(list, flags);                                                   \
            mode = va_arg(list, mode_t);                                             \
            va_end(list);                                                            \
        }                                                                            \
        struct stat found;                                                           \
        int here = (flags & (O_CREAT | O_TRUNC)) && at(FOLDER, path, whole);         \
        int new = here && ((flags & O_TRUNC) || stat(whole, &found) != 0);           \
        int fd = real ARGUMENTS;                                                     \
        if (new && fd >= 0) done("open", whole);                                     \
        return fd;                                                                   \
    }
int open(const char *path, int flags, ...) OPENS(open, AT_FDCWD, (path, flags, mode))
int open64(const char *path, int flags, ...) OPENS(open64, AT_FDCWD, (path, flags, mode))
int openat(int folder, const char *path, int flags, ...) OPENS(openat, folder, (folder, path, flags, mode))
int openat64(int folder, const char *path, int flags, ...) OPENS(openat64, folder, (folder, path, flags, mode))

#define CHANGES(name, PATH, PARAMETERS, ARGUMENTS)     \
    int name PARAMETERS {                              \
        REAL(name);                                    \
        char whole[PATH_MAX];                          \
        int here = PATH, answer = real ARGUMENTS;      \
        if (here && answer == 0) done(#name, whole);   \
        return answer;                                 \
    }
CHANGES(rename, at(AT_FDCWD, to, whole), (const char *from, const char *to), (from, to))
CHANGES(renameat, at(there, to, whole), (int here_, const char *from, int there, const char *to), (here_, from, there, to))
CHANGES(link, at(AT_FDCWD, to, whole), (const char *from, const char *to), (from, to))
CHANGES(symlink, at(AT_FDCWD, to, whole), (const char *from, const char *to), (from, to))
CHANGES(unlink, at(AT_FDCWD, path, whole), (const char *path), (path))
CHANGES(unlinkat, at(folder, path, whole), (int folder, const char *path, int flags), (folder, path, flags))
CHANGES(rmdir, at(AT_FDCWD, path, whole), (const char *path), (path))
CHANGES(mkdir, at(AT_FDCWD, path, whole), (const char *path, mode_t mode), (path, mode))
CHANGES(mkdirat, at(folder, path, whole), (int folder, const char *path, mode_t mode), (folder, path, mode))
CHANGES(ftruncate, file_of(fd, whole), (int fd, off_t size), (fd, size))
CHANGES(ftruncate64, file_of(fd, whole), (int fd, off64_t size), (fd, size))
CHANGES(chmod, at(AT_FDCWD, path, whole), (const char *path, mode_t mode), (path, mode))
