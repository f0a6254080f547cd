/* The two ends of the bench at the speed of C, so that the proxy between them is what everything waits for.
 *
 *   saturate broker PORT ANSWERS                   prints its port once it is bound on 127.0.0.1; serves until it is ended
 *   saturate load PORT CONNECTIONS DEPTH REQUEST   reads a line with a number of requests, sends them, prints "done"; again
 *
 * REQUEST is a file with one frame. ANSWERS is a file of (int16 API key, int16 version, frame); a broker answers a request
 * with the frame of its key and version. Frames are made by the codec (cases.py): all that is known here is that a frame
 * begins with its size, where the correlation id stands, and that of a request the key and the version come first.
 * A defect of the other end ends the program with a message: an answer of another size or id than the one that is due.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

enum { READ_BYTES = 1 << 20, HEAD_BYTES = 12, EVENTS = 256, MAX_ANSWERS = 64, TIMEOUT_MS = 10000 };

struct connection {
    int fd, full;              /* full: it takes no more for now, and only that is waited for */
    uint8_t head[HEAD_BYTES];  /* of the frame in transit */
    size_t head_bytes;
    uint64_t body_left;        /* bytes of it behind the head that have not come */
    uint8_t *unsent;
    size_t unsent_bytes, sent_bytes, room;
    uint32_t next_id, due_id;
    uint64_t quota;            /* requests of this run that are not sent yet */
};

struct answer { uint16_t key, version; uint8_t *frame; size_t bytes; };

static int poller;
static struct answer answers[MAX_ANSWERS];
static int answer_count;
static uint8_t *request;
static size_t request_bytes;
static uint32_t answer_bytes;  /* of the first answer; all others must be as long */

static void fail(const char *what) { fprintf(stderr, "saturate: %s (%s)\n", what, strerror(errno)); exit(1); }
static uint32_t read32(const uint8_t *p) { return (uint32_t)p[0] << 24 | p[1] << 16 | p[2] << 8 | p[3]; }
static uint16_t read16(const uint8_t *p) { return p[0] << 8 | p[1]; }
static void write32(uint8_t *p, uint32_t value) { p[0] = value >> 24; p[1] = value >> 16; p[2] = value >> 8; p[3] = value; }

static uint8_t *file(const char *path, size_t *bytes) {
    FILE *in = fopen(path, "rb");
    if (!in || fseek(in, 0, SEEK_END)) fail(path);
    *bytes = ftell(in);
    rewind(in);
    uint8_t *data = malloc(*bytes + 1);
    if (fread(data, 1, *bytes, in) != *bytes) fail(path);
    fclose(in);
    return data;
}

static void watch(struct connection *c, int full) {
    if (c->full == full) return;
    c->full = full;
    struct epoll_event event = {.events = full ? EPOLLOUT : EPOLLIN, .data.ptr = c};
    if (epoll_ctl(poller, EPOLL_CTL_MOD, c->fd, &event)) fail("epoll_ctl");
}

static struct connection *connection(int fd) {
    int on = 1;
    struct connection *c = calloc(1, sizeof *c);
    c->fd = fd;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    fcntl(fd, F_SETFL, O_NONBLOCK);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = c};
    if (epoll_ctl(poller, EPOLL_CTL_ADD, fd, &event)) fail("epoll_ctl");
    return c;
}

static void keep(struct connection *c, const uint8_t *frame, size_t bytes, size_t id_at, uint32_t id) {
    if (c->unsent_bytes + bytes > c->room) {
        c->room = 2 * (c->unsent_bytes + bytes);
        c->unsent = realloc(c->unsent, c->room);
    }
    memcpy(c->unsent + c->unsent_bytes, frame, bytes);
    write32(c->unsent + c->unsent_bytes + id_at, id);
    c->unsent_bytes += bytes;
}

/* Send what is kept, as much as the other end takes now. 0: the connection has gone. */
static int flush(struct connection *c) {
    while (c->sent_bytes < c->unsent_bytes) {
        ssize_t count = send(c->fd, c->unsent + c->sent_bytes, c->unsent_bytes - c->sent_bytes, MSG_NOSIGNAL);
        if (count < 0 && errno == EAGAIN) { watch(c, 1); return 1; }
        if (count < 0) return 0;
        c->sent_bytes += count;
    }
    c->sent_bytes = c->unsent_bytes = 0;
    watch(c, 0);
    return 1;
}

static void ask(struct connection *c) {
    keep(c, request, request_bytes, 8, c->next_id++);
    c->quota--;
}

/* A frame whose head is here begins; returns how many bytes of it follow the head. */
static uint64_t begins(struct connection *c, size_t head_bytes) {
    uint32_t bytes = 4 + read32(c->head);
    if (bytes < head_bytes || bytes > 1u << 30) fail("what came is no frame");
    if (request) {
        if (!answer_bytes) answer_bytes = bytes;
        if (bytes != answer_bytes || read32(c->head + 4) != c->due_id) fail("an answer that is not the one due");
    }
    return bytes - head_bytes;
}

static void ended(struct connection *c, uint64_t *left) {
    if (request) {
        c->due_id++;
        --*left;
        if (c->quota) ask(c);
        return;
    }
    uint16_t key = read16(c->head + 4), version = read16(c->head + 6);
    for (int i = 0; i < answer_count; i++)
        if (answers[i].key == key && answers[i].version == version) {
            keep(c, answers[i].frame, answers[i].bytes, 4, read32(c->head + 8));
            return;
        }
    fail("a request that the broker has no answer for");
}

/* Read once, and take every frame that is whole. 0: the connection has gone. */
static int receive(struct connection *c, uint8_t *buffer, uint64_t *left) {
    const size_t head_bytes = request ? 8 : HEAD_BYTES;
    ssize_t count = recv(c->fd, buffer, READ_BYTES, 0);
    if (count < 0 && errno == EAGAIN) return 1;
    if (count <= 0) return 0;
    for (ssize_t at = 0; at < count;) {
        if (c->head_bytes < head_bytes) {
            size_t take = head_bytes - c->head_bytes;
            if (take > (size_t)(count - at)) take = count - at;
            memcpy(c->head + c->head_bytes, buffer + at, take);
            c->head_bytes += take;
            at += take;
            if (c->head_bytes < head_bytes) break;
            c->body_left = begins(c, head_bytes);
        }
        uint64_t take = (uint64_t)(count - at) < c->body_left ? (uint64_t)(count - at) : c->body_left;
        c->body_left -= take;
        at += take;
        if (!c->body_left) { c->head_bytes = 0; ended(c, left); }
    }
    return flush(c);
}

static void serve(int port, const char *path) {
    size_t bytes;
    uint8_t *data = file(path, &bytes);
    for (size_t at = 0; at + 8 <= bytes && answer_count < MAX_ANSWERS;) {
        size_t frame_bytes = 4 + read32(data + at + 4);
        answers[answer_count++] = (struct answer){read16(data + at), read16(data + at + 2), data + at + 4, frame_bytes};
        at += 4 + frame_bytes;
    }
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int listener = socket(AF_INET, SOCK_STREAM, 0), on = 1;
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(listener, (void *)&address, sizeof address) || listen(listener, 1024)) fail("bind");
    printf("%d\n", port);
    fflush(stdout);
    struct epoll_event events[EVENTS] = {{.events = EPOLLIN}};
    epoll_ctl(poller, EPOLL_CTL_ADD, listener, events);
    uint8_t *buffer = malloc(READ_BYTES);
    for (;;) {
        int count = epoll_wait(poller, events, EVENTS, -1);
        for (int i = 0; i < count; i++) {
            struct connection *c = events[i].data.ptr;
            if (!c) {
                int fd = accept(listener, NULL, NULL);
                if (fd >= 0) connection(fd);
            } else if (!(c->full ? flush(c) : receive(c, buffer, NULL))) {
                close(c->fd);
                free(c->unsent);
                free(c);
            }
        }
    }
}

static void load(int port, int connections, int depth, const char *path) {
    request = file(path, &request_bytes);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct connection **all = calloc(connections, sizeof *all);
    for (int i = 0; i < connections; i++) {
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        if (connect(fd, (void *)&address, sizeof address)) fail("connect");
        all[i] = connection(fd);
    }
    struct epoll_event events[EVENTS];
    uint8_t *buffer = malloc(READ_BYTES);
    unsigned long wanted;
    while (scanf("%lu", &wanted) == 1) {
        uint64_t left = wanted;
        for (int i = 0; i < connections; i++) {
            all[i]->quota = (wanted + i) / connections;
            for (int n = 0; n < depth && all[i]->quota; n++) ask(all[i]);
            if (!flush(all[i])) fail("the connection was closed");
        }
        while (left) {
            int count = epoll_wait(poller, events, EVENTS, TIMEOUT_MS);
            if (!count) fail("no answer in time");
            for (int i = 0; i < count; i++) {
                struct connection *c = events[i].data.ptr;
                if (!(c->full ? flush(c) : receive(c, buffer, &left))) fail("the connection was closed with answers due");
            }
        }
        printf("done\n");
        fflush(stdout);
    }
}

int main(int count, char **argument) {
    poller = epoll_create1(0);
    if (count == 4 && !strcmp(argument[1], "broker")) serve(atoi(argument[2]), argument[3]);
    else if (count == 6 && !strcmp(argument[1], "load"))
        load(atoi(argument[2]), atoi(argument[3]), atoi(argument[4]), argument[5]);
    else { fprintf(stderr, "usage: saturate broker PORT ANSWERS | load PORT CONNECTIONS DEPTH REQUEST\n"); return 2; }
}
