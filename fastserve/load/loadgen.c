// A load generator for HTTP/1.1 servers that stream: one thread, epoll, keep-alive connections.
//
//     loadgen < plan          send what the plan says; progress and results are lines of JSON
//     loadgen parse N < file  read a response in slices of N bytes, and print what was found in it
//
// plan.py writes the plan: settings, the requests as bytes, and for an open loop when each is to be
// sent. In an open loop a latency counts from the moment the request was to be sent, even if every
// connection was busy then, so that a slow server cannot hide what it kept from being sent. All
// times are CLOCK_MONOTONIC in ns, so that whoever measures the server knows the same window.

#define _GNU_SOURCE
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#include "answer.h"
#include "histogram.h"

// While connections fail, a closed loop tries again this often: not as fast as it can.
static const uint64_t PAUSE_NS = 50 * 1000000ull;
static const uint64_t PROGRESS_NS = 500 * 1000000ull;

struct request {
    char *bytes;
    size_t num_bytes;
    unsigned expected_chunks;  // of a stream, or tokens of an object; 0: not checked
};

struct send {
    uint64_t at_ns;
    unsigned request;
};

static struct {
    char host[256], port[16];
    unsigned connections;
    uint64_t begin_ns, ramp_ns, window_begin_ns, window_end_ns, give_up_ns;
    struct request *requests;
    unsigned num_requests;
    struct send *sends;  // none: a closed loop
    size_t num_sends;
} plan;

enum connection_state { IDLE, CONNECTING, SENDING, READING };

struct connection {
    enum connection_state state;
    int fd;  // -1: not connected
    const struct request *request;
    size_t sent;
    uint64_t intended_ns, last_chunk_ns;
    struct answer answer;
};

enum failure { CONNECT, CUT, STATUS, MALFORMED, ERROR_EVENT, INCOMPLETE, FAILURES };
static const char *const FAILURE_NAMES[] = {
    "connect", "cut", "status", "malformed", "error_event", "incomplete"};

// What is counted in the window, but for failures, which count whenever they happen.
static struct {
    uint64_t chunks, merged, reads, bytes, requests, answered, failures[FAILURES], opened;
    struct histogram ttft, itl, latency;
} counted;

static struct addrinfo *server_address;
static int poller, timer;
static struct connection *connections, **idle;
static unsigned num_idle, num_in_flight;
static size_t next_send, next_request;
static uint64_t pause_until_ns, cpu_began_ns, cpu_ended_ns;

static void die(const char *what) {
    fprintf(stderr, "loadgen: %s: %s\n", what, errno ? strerror(errno) : "malformed plan");
    exit(2);
}

static uint64_t clock_ns(clockid_t clock) {
    struct timespec time;
    clock_gettime(clock, &time);
    return (uint64_t)time.tv_sec * 1000000000ull + (uint64_t)time.tv_nsec;
}

static bool in_window(uint64_t at_ns) {
    return plan.window_begin_ns <= at_ns && at_ns < plan.window_end_ns;
}

// ---- The plan

static void *grown(void *array, size_t number, size_t item_bytes) {
    if (number & (number - 1)) return array;  // grows at powers of two
    array = realloc(array, (number ? 2 * number : 1) * item_bytes);
    if (!array) die("memory");
    return array;
}

static void read_request(void) {
    plan.requests = grown(plan.requests, plan.num_requests, sizeof *plan.requests);
    struct request *request = &plan.requests[plan.num_requests++];
    if (scanf("%zu %u", &request->num_bytes, &request->expected_chunks) != 2) die("request");
    getchar();  // the line end; what follows are bytes of any kind
    request->bytes = malloc(request->num_bytes);
    if (fread(request->bytes, 1, request->num_bytes, stdin) != request->num_bytes) die("request");
}

static void read_send(void) {
    plan.sends = grown(plan.sends, plan.num_sends, sizeof *plan.sends);
    struct send *send = &plan.sends[plan.num_sends++];
    if (scanf("%" SCNu64 " %u", &send->at_ns, &send->request) != 2) die("send");
    if (send->request >= plan.num_requests) die("send");
    send->at_ns += plan.begin_ns;
}

static bool read_number(const char *word) {
    const struct { const char *name; uint64_t *value; } TIMES[] = {
        {"begin_ns", &plan.begin_ns}, {"ramp_ns", &plan.ramp_ns},
        {"window_begin_ns", &plan.window_begin_ns}, {"window_end_ns", &plan.window_end_ns},
        {"give_up_ns", &plan.give_up_ns}};
    for (unsigned i = 0; i < sizeof TIMES / sizeof *TIMES; i++)
        if (!strcmp(word, TIMES[i].name)) return scanf("%" SCNu64, TIMES[i].value) == 1;
    if (!strcmp(word, "connections")) return scanf("%u", &plan.connections) == 1;
    return !strcmp(word, "server") && scanf("%255s %15s", plan.host, plan.port) == 2;
}

static void read_plan(void) {
    char word[32];
    while (scanf("%31s", word) == 1 && strcmp(word, "go")) {
        if (!strcmp(word, "request")) read_request();
        else if (!strcmp(word, "send")) read_send();
        else if (!read_number(word)) die(word);
    }
    if (!plan.num_requests || !plan.connections) die("nothing to send");
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICSERV};
    int error = getaddrinfo(plan.host, plan.port, &hints, &server_address);
    if (error) {
        fprintf(stderr, "loadgen: %s: %s\n", plan.host, gai_strerror(error));
        exit(2);
    }
}

// ---- One connection

static void listen_to(struct connection *connection, unsigned events, int operation) {
    struct epoll_event event = {.events = events, .data.ptr = connection};
    if (epoll_ctl(poller, operation, connection->fd, &event)) die("epoll_ctl");
}

static void hang_up(struct connection *connection) {
    if (connection->fd >= 0) close(connection->fd);
    connection->fd = -1;
}

static void become_idle(struct connection *connection) {
    connection->state = IDLE;
    idle[num_idle++] = connection;
    num_in_flight--;
}

static void fail(struct connection *connection, enum failure failure, uint64_t now_ns) {
    // The first of its kind is told in full: what it is about is often plain from it.
    struct answer *answer = &connection->answer;
    if (!counted.failures[failure]++)
        fprintf(stderr, "loadgen: the first failure of kind %s: status %d, %u chunks, %.*s\n",
                FAILURE_NAMES[failure], answer->status, answer->chunks,
                answer->is_stream ? 0 : (int)(answer->kept_bytes < 300 ? answer->kept_bytes : 300),
                answer->kept_bytes ? answer->kept : "");
    if (failure == CONNECT || failure == CUT) pause_until_ns = now_ns + PAUSE_NS;
    if (failure != STATUS || answer->closes) hang_up(connection);
    become_idle(connection);
}

static void send_request(struct connection *connection, uint64_t now_ns) {
    const struct request *request = connection->request;
    while (connection->sent < request->num_bytes) {
        ssize_t sent = send(connection->fd, request->bytes + connection->sent,
                            request->num_bytes - connection->sent, MSG_NOSIGNAL);
        if (sent < 0 && errno == EAGAIN) {
            if (connection->state != SENDING) listen_to(connection, EPOLLOUT, EPOLL_CTL_MOD);
            connection->state = SENDING;
            return;
        }
        if (sent < 0) {
            fail(connection, CUT, now_ns);
            return;
        }
        connection->sent += (size_t)sent;
    }
    if (connection->state != READING) listen_to(connection, EPOLLIN, EPOLL_CTL_MOD);
    connection->state = READING;
}

static void open_connection(struct connection *connection, uint64_t now_ns) {
    const struct addrinfo *to = server_address;
    connection->fd = socket(to->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (connection->fd < 0) die("socket");
    int on = 1;
    setsockopt(connection->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    connection->state = CONNECTING;
    counted.opened++;
    if (connect(connection->fd, to->ai_addr, to->ai_addrlen) && errno != EINPROGRESS) {
        fail(connection, CONNECT, now_ns);
        return;
    }
    listen_to(connection, EPOLLOUT, EPOLL_CTL_ADD);
}

static void start(const struct request *request, uint64_t intended_ns, uint64_t now_ns) {
    struct connection *connection = idle[--num_idle];
    num_in_flight++;
    connection->request = request;
    connection->intended_ns = intended_ns;
    connection->sent = 0;
    answer_reset(&connection->answer);
    if (connection->fd < 0) {
        open_connection(connection, now_ns);
        return;
    }
    connection->state = READING;  // as it is still listened to
    send_request(connection, now_ns);
}

static bool is_complete(const struct connection *connection) {
    const struct answer *answer = &connection->answer;
    unsigned expected = connection->request->expected_chunks;
    if (!expected) return true;
    if (!answer->finished) return false;
    return answer->is_stream ? answer->chunks == expected && answer->done
                             : answer->completion_tokens == expected && answer->chunks;
}

static void finish(struct connection *connection, uint64_t now_ns) {
    const struct answer *answer = &connection->answer;
    counted.answered++;
    if (answer->status != 200) {
        fail(connection, STATUS, now_ns);
        return;
    }
    if (answer->failed || !is_complete(connection)) {
        fail(connection, answer->failed ? ERROR_EVENT : INCOMPLETE, now_ns);
        return;
    }
    if (in_window(now_ns)) counted.requests++;
    if (in_window(connection->intended_ns))
        histogram_add(&counted.latency, now_ns - connection->intended_ns);
    if (answer->closes) hang_up(connection);
    become_idle(connection);
}

// Chunks that came in one read came at one time: all but the first of them are merged.
static void count_chunks(struct connection *connection, unsigned before, uint64_t now_ns) {
    unsigned new = connection->answer.chunks - before;
    if (!new) return;
    if (!before && in_window(connection->intended_ns))
        histogram_add(&counted.ttft, now_ns - connection->intended_ns);
    if (in_window(now_ns)) {
        counted.chunks += new;
        counted.merged += new - 1;
        if (before) histogram_add(&counted.itl, now_ns - connection->last_chunk_ns);
        for (unsigned i = 1; i < new; i++) histogram_add(&counted.itl, 0);
    }
    connection->last_chunk_ns = now_ns;
}

static void read_answer(struct connection *connection) {
    static char buffer[256 << 10];
    ssize_t bytes = recv(connection->fd, buffer, sizeof buffer, 0);
    uint64_t now_ns = clock_ns(CLOCK_MONOTONIC);
    if (bytes < 0 && errno == EAGAIN) return;
    struct answer *answer = &connection->answer;
    if (connection->state == IDLE) {
        hang_up(connection);  // the server has enough of us, as it may between two requests
        return;
    }
    if (bytes <= 0) {
        hang_up(connection);
        if (bytes == 0 && answer_end(answer)) finish(connection, now_ns);
        else fail(connection, CUT, now_ns);
        return;
    }
    if (in_window(now_ns)) counted.reads++, counted.bytes += (uint64_t)bytes;
    unsigned before = answer->chunks;
    answer_feed(answer, buffer, (size_t)bytes);
    if (answer->is_stream) count_chunks(connection, before, now_ns);
    if (answer->state == BROKEN) fail(connection, MALFORMED, now_ns);
    else if (answer->state == WHOLE) finish(connection, now_ns);
}

static void on_event(struct connection *connection) {
    if (connection->fd < 0) return;
    if (connection->state == CONNECTING) {
        int error = 0;
        socklen_t length = sizeof error;
        getsockopt(connection->fd, SOL_SOCKET, SO_ERROR, &error, &length);
        if (error) {
            fail(connection, CONNECT, clock_ns(CLOCK_MONOTONIC));
            return;
        }
    }
    if (connection->state == CONNECTING || connection->state == SENDING)
        send_request(connection, clock_ns(CLOCK_MONOTONIC));
    else
        read_answer(connection);
}

// ---- The loop

// How many requests a closed loop has in flight: all connections, once the ramp is over.
static unsigned allowed_in_flight(uint64_t now_ns) {
    if (now_ns < plan.begin_ns) return 0;
    uint64_t since_ns = now_ns - plan.begin_ns;
    if (since_ns >= plan.ramp_ns) return plan.connections;
    return 1 + (unsigned)((double)plan.connections * (double)since_ns / (double)plan.ramp_ns);
}

// Starts what is due, and returns when to look again.
static uint64_t start_due(uint64_t now_ns) {
    if (plan.num_sends) {
        while (num_idle && next_send < plan.num_sends && plan.sends[next_send].at_ns <= now_ns) {
            const struct send *send = &plan.sends[next_send++];
            start(&plan.requests[send->request], send->at_ns, now_ns);
        }
        return num_idle && next_send < plan.num_sends ? plan.sends[next_send].at_ns : UINT64_MAX;
    }
    if (now_ns >= plan.window_end_ns) return UINT64_MAX;
    unsigned allowed = allowed_in_flight(now_ns);
    while (num_idle && num_in_flight < allowed && now_ns >= pause_until_ns)
        start(&plan.requests[next_request++ % plan.num_requests], now_ns, now_ns);
    if (now_ns < plan.begin_ns) return plan.begin_ns;
    if (allowed < plan.connections) return now_ns + plan.ramp_ns / plan.connections + 1;
    return num_idle ? pause_until_ns : UINT64_MAX;
}

// An open loop is over with its last answer, so that nobody waits out a trace's window.
static bool is_over(uint64_t now_ns) {
    if (now_ns >= plan.give_up_ns) return true;
    if (num_in_flight || next_send < plan.num_sends) return false;
    return plan.num_sends || now_ns >= plan.window_end_ns;
}

static uint64_t failures(void) {
    uint64_t sum = 0;
    for (unsigned i = 0; i < FAILURES; i++) sum += counted.failures[i];
    return sum;
}

static void print_progress(void) {
    printf("{\"progress\": {\"in_flight\": %u, \"requests\": %" PRIu64 ", \"chunks\": %" PRIu64
           ", \"failures\": %" PRIu64 "}}\n",
           num_in_flight, counted.requests, counted.chunks, failures());
    fflush(stdout);
}

// Does what a clock tells, and returns when it next has something to tell.
static uint64_t on_clock(uint64_t now_ns) {
    static uint64_t progress_ns;
    if (!cpu_began_ns && now_ns >= plan.window_begin_ns)
        cpu_began_ns = clock_ns(CLOCK_PROCESS_CPUTIME_ID);
    if (!cpu_ended_ns && now_ns >= plan.window_end_ns)
        cpu_ended_ns = clock_ns(CLOCK_PROCESS_CPUTIME_ID);
    if (now_ns >= progress_ns) {
        print_progress();
        progress_ns = now_ns + PROGRESS_NS;
    }
    const uint64_t times_ns[] = {plan.window_begin_ns, plan.window_end_ns, plan.give_up_ns};
    uint64_t next_ns = progress_ns;
    for (unsigned i = 0; i < sizeof times_ns / sizeof *times_ns; i++)
        if (now_ns < times_ns[i] && times_ns[i] < next_ns) next_ns = times_ns[i];
    return next_ns;
}

static void set_timer(uint64_t at_ns) {
    static uint64_t set_ns;
    if (at_ns == set_ns) return;
    set_ns = at_ns;
    struct itimerspec spec = {.it_value = {.tv_sec = (time_t)(at_ns / 1000000000ull),
                                           .tv_nsec = (long)(at_ns % 1000000000ull)}};
    if (timerfd_settime(timer, TFD_TIMER_ABSTIME, &spec, NULL)) die("timerfd_settime");
}

static void run(void) {
    struct epoll_event events[1024];
    for (;;) {
        uint64_t now_ns = clock_ns(CLOCK_MONOTONIC);
        uint64_t clock_next_ns = on_clock(now_ns);
        if (is_over(now_ns)) break;
        uint64_t start_next_ns = start_due(now_ns);
        // A moment that is past already, as after a pause, is one to wait for all the same.
        uint64_t next_ns = start_next_ns < clock_next_ns ? start_next_ns : clock_next_ns;
        set_timer(next_ns > now_ns ? next_ns : now_ns + 1);
        int number = epoll_wait(poller, events, 1024, -1);
        if (number < 0 && errno != EINTR) die("epoll_wait");
        for (int i = 0; i < number; i++) {
            struct connection *connection = events[i].data.ptr;
            uint64_t expired;
            if (connection) on_event(connection);
            else if (read(timer, &expired, sizeof expired) < 0 && errno != EAGAIN) die("timer");
        }
    }
    uint64_t now_ns = clock_ns(CLOCK_MONOTONIC);
    if (now_ns < plan.window_end_ns) plan.window_end_ns = now_ns;
    on_clock(now_ns);
}

static void print_result(void) {
    printf("{\"result\": {\"chunks\": %" PRIu64 ", \"merged\": %" PRIu64 ", \"reads\": %" PRIu64
           ", \"bytes\": %" PRIu64 ", \"requests\": %" PRIu64 ", \"answered\": %" PRIu64
           ", \"opened\": %" PRIu64 ", \"unfinished\": %zu, \"cpu_ns\": %" PRIu64
           ", \"window_ns\": %" PRIu64 ", \"failures\": {",
           counted.chunks, counted.merged, counted.reads, counted.bytes, counted.requests,
           counted.answered, counted.opened, num_in_flight + plan.num_sends - next_send,
           cpu_ended_ns - cpu_began_ns, plan.window_end_ns - plan.window_begin_ns);
    for (unsigned i = 0; i < FAILURES; i++)
        printf("%s\"%s\": %" PRIu64, i ? ", " : "", FAILURE_NAMES[i], counted.failures[i]);
    printf("}, ");
    histogram_print(&counted.ttft, "ttft");
    printf(", ");
    histogram_print(&counted.itl, "itl");
    printf(", ");
    histogram_print(&counted.latency, "latency");
    printf("}}\n");
}

static int parse(unsigned long slice_bytes) {
    struct answer answer = {.kept = NULL};
    char *slice = malloc(slice_bytes);
    for (size_t bytes; (bytes = fread(slice, 1, slice_bytes, stdin)) > 0;)
        answer_feed(&answer, slice, bytes);
    bool whole = answer_end(&answer);
    printf("{\"status\": %d, \"whole\": %d, \"is_stream\": %d, \"closes\": %d, \"events\": %u, "
           "\"chunks\": %u, \"completion_tokens\": %u, \"finished\": %d, \"done\": %d, "
           "\"failed\": %d}\n",
           answer.status, whole, answer.is_stream, answer.closes, answer.events, answer.chunks,
           answer.completion_tokens, answer.finished, answer.done, answer.failed);
    return 0;
}

int main(int argc, char **argv) {
    if (argc == 3 && !strcmp(argv[1], "parse")) return parse(strtoul(argv[2], NULL, 10));
    read_plan();
    poller = epoll_create1(EPOLL_CLOEXEC);
    timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = NULL};
    if (poller < 0 || timer < 0 || epoll_ctl(poller, EPOLL_CTL_ADD, timer, &event)) die("epoll");
    connections = calloc(plan.connections, sizeof *connections);
    idle = calloc(plan.connections, sizeof *idle);
    if (!connections || !idle) die("memory");
    // The first to be used is the last put down.
    for (unsigned i = plan.connections; i-- > 0;) {
        connections[i].fd = -1;
        idle[num_idle++] = &connections[i];
    }
    run();
    print_result();
    return 0;
}
