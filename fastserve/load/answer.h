// An HTTP/1.1 response, and the OpenAI events or object in it, as its bytes come.
//
// Pure: bytes in, counts out; it knows nothing of sockets and clocks, and it does not matter how the
// bytes are sliced. JSON is not parsed: what is counted is told by keys that are written nowhere
// else, for a quote inside of a JSON string is always escaped.

#include <ctype.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

// A longer head, event or object than this makes the answer BROKEN.
enum { KEPT_BYTES_MAX = 16 << 20 };

enum answer_state {
    HEAD,         // RFC 9112 4: up to the empty line
    SIZE,         // RFC 9112 7.1: the digits of a chunk's size
    EXTENSION,    // what stands behind them, to the end of the line
    DATA,         // of a chunk; `left` bytes to come
    DATA_END,     // the line end behind it
    TRAILER,      // behind the last chunk, up to an empty line
    LENGTH,       // a body of Content-Length; `left` bytes to come
    UNTIL_CLOSE,  // a body that ends with the connection
    WHOLE,
    BROKEN,
};

struct answer {
    enum answer_state state;
    int status;
    bool is_stream;  // of server-sent events
    bool closes;     // the connection, when it is whole
    uint64_t left;
    unsigned size_digits;
    bool trailer_has_text;

    // What has come of a head, a line of an event, or an object that is not all there.
    char *kept;
    size_t kept_bytes, kept_room;
    // What the event in the making has been found to hold.
    bool in_event, has_content;

    unsigned events, chunks;     // all events but [DONE]; those that hold text
    unsigned completion_tokens;  // as an object's usage says
    bool finished, done, failed; // a finish reason; [DONE]; an error object
};

static void answer_reset(struct answer *answer) {
    char *kept = answer->kept;
    size_t room = answer->kept_room;
    *answer = (struct answer){.kept = kept, .kept_room = room};
}

static void answer_keep(struct answer *answer, const char *data, size_t bytes) {
    size_t needed = answer->kept_bytes + bytes;
    if (needed > KEPT_BYTES_MAX) {
        answer->state = BROKEN;
        return;
    }
    if (needed > answer->kept_room) {
        answer->kept_room = needed < 1024 ? 1024 : 2 * needed;
        answer->kept = realloc(answer->kept, answer->kept_room);
        if (!answer->kept) abort();
    }
    memcpy(answer->kept + answer->kept_bytes, data, bytes);
    answer->kept_bytes = needed;
}

// ---- JSON, as far as it must be understood

// The value of a key: where it begins, or NULL. Servers differ in the space before it.
static const char *json_value(const char *json, size_t bytes, const char *key, const char **end) {
    const char *found = memmem(json, bytes, key, strlen(key));
    if (!found) return NULL;
    *end = json + bytes;
    found += strlen(key);
    while (found < *end && *found == ' ') found++;
    return found < *end ? found : NULL;
}

// Whether any value of the key is a string that is not empty.
static bool json_has_text(const char *json, size_t bytes, const char *key) {
    const char *end, *value = json;
    while ((value = json_value(value, bytes - (size_t)(value - json), key, &end)))
        if (value + 1 < end && value[0] == '"' && value[1] != '"') return true;
    return false;
}

static void on_json(struct answer *answer, const char *json, size_t bytes) {
    static const char *const TEXTS[] = {
        "\"content\":", "\"text\":", "\"reasoning_content\":", "\"reasoning\":"};
    for (unsigned i = 0; i < sizeof TEXTS / sizeof *TEXTS && !answer->has_content; i++)
        answer->has_content = json_has_text(json, bytes, TEXTS[i]);
    if (json_has_text(json, bytes, "\"finish_reason\":")) answer->finished = true;
    if (bytes > 8 && !memcmp(json, "{\"error\"", 8)) answer->failed = true;
}

static void on_object(struct answer *answer, const char *json, size_t bytes) {
    on_json(answer, json, bytes);
    answer->chunks = answer->has_content;
    const char *end, *value = json_value(json, bytes, "\"completion_tokens\":", &end);
    for (; value && value < end && isdigit((unsigned char)*value); value++)
        answer->completion_tokens = answer->completion_tokens * 10 + (unsigned)(*value - '0');
}

// ---- Server-sent events (WHATWG HTML 9.2)

static void on_line(struct answer *answer, const char *line, size_t bytes) {
    if (bytes && line[bytes - 1] == '\r') bytes--;
    if (bytes == 0) {
        answer->events += answer->in_event;
        answer->chunks += answer->in_event && answer->has_content;
        answer->in_event = answer->has_content = false;
        return;
    }
    if (bytes < 5 || memcmp(line, "data:", 5)) return;  // a comment, or a field of no interest
    line += 5, bytes -= 5;
    if (bytes && *line == ' ') line++, bytes--;
    if (bytes == 6 && !memcmp(line, "[DONE]", 6)) {
        answer->done = true;
        return;
    }
    answer->in_event = true;
    on_json(answer, line, bytes);
}

static void on_lines(struct answer *answer, const char *data, size_t bytes) {
    const char *end = data + bytes;
    while (data < end) {
        const char *newline = memchr(data, '\n', (size_t)(end - data));
        if (!newline || answer->kept_bytes)
            answer_keep(answer, data, (size_t)((newline ? newline : end) - data));
        if (!newline) return;
        if (answer->kept_bytes)
            on_line(answer, answer->kept, answer->kept_bytes);
        else
            on_line(answer, data, (size_t)(newline - data));
        answer->kept_bytes = 0;
        data = newline + 1;
    }
}

static void on_body(struct answer *answer, const char *data, size_t bytes) {
    if (answer->is_stream)
        on_lines(answer, data, bytes);
    else
        answer_keep(answer, data, bytes);
}

static void on_whole(struct answer *answer) {
    answer->state = WHOLE;
    if (!answer->is_stream) on_object(answer, answer->kept, answer->kept_bytes);
}

// ---- HTTP (RFC 9112)

static bool field_is(const char *line, const char *name, const char *value) {
    size_t bytes = strlen(name);
    return !strncasecmp(line, name, bytes) && strcasestr(line + bytes, value);
}

// A head whose lines have been parted by NUL bytes.
static void on_head(struct answer *answer, const char *line, const char *end) {
    bool chunked = false, has_length = false;
    if (sscanf(line, "HTTP/1.%*1[01] %3d", &answer->status) != 1 || answer->status < 100) {
        answer->state = BROKEN;
        return;
    }
    answer->closes = line[7] == '0';
    for (line += strlen(line) + 1; line < end; line += strlen(line) + 1) {
        if (!strncasecmp(line, "content-length:", 15)) {
            has_length = true;
            answer->left = strtoull(line + 15, NULL, 10);
        }
        if (field_is(line, "transfer-encoding:", "chunked")) chunked = true;
        if (field_is(line, "connection:", "close")) answer->closes = true;
        if (field_is(line, "content-type:", "text/event-stream")) answer->is_stream = true;
    }
    answer->kept_bytes = 0;
    if (answer->status < 200) return;  // RFC 9110 15.2: an interim response; the real one follows
    answer->state = chunked ? SIZE : has_length ? LENGTH : UNTIL_CLOSE;
    if (chunked) answer->left = 0;  // RFC 9112 6.3: then a Content-Length means nothing
    if (answer->state == UNTIL_CLOSE) answer->closes = true;
    if (answer->state == LENGTH && !answer->left) on_whole(answer);
}

// Takes the bytes up to the end of a head, which is kept until it is all there.
static size_t take_head(struct answer *answer, const char *data, size_t bytes) {
    size_t before = answer->kept_bytes;
    answer_keep(answer, data, bytes);
    if (answer->state == BROKEN) return bytes;
    size_t from = before < 3 ? 0 : before - 3;
    char *end = memmem(answer->kept + from, answer->kept_bytes - from, "\r\n\r\n", 4);
    if (!end) return bytes;
    size_t taken = (size_t)(end + 4 - answer->kept) - before;
    for (char *at = answer->kept; at < end + 4; at++)
        if (*at == '\r' || *at == '\n') *at = 0;
    // Each line end has become two NUL bytes: the second reads as a line that is empty.
    on_head(answer, answer->kept, end);
    return taken;
}

// Takes one byte of a chunk's framing.
static void on_framing(struct answer *answer, unsigned char byte) {
    switch (answer->state) {
    case SIZE:
        if (isxdigit(byte) && answer->size_digits < 15) {
            int digit = isdigit(byte) ? byte - '0' : tolower(byte) - 'a' + 10;
            answer->left = answer->left * 16 + (unsigned)digit;
            answer->size_digits++;
            return;
        }
        if (!answer->size_digits || !byte || !strchr("\r\n; \t", byte)) {
            answer->state = BROKEN;
            return;
        }
        answer->state = EXTENSION;
        // fall through
    case EXTENSION:
        if (byte != '\n') return;
        answer->state = answer->left ? DATA : TRAILER;
        answer->size_digits = 0;
        return;
    case DATA_END:
        if (byte == '\n') answer->state = SIZE;
        else if (byte != '\r') answer->state = BROKEN;
        return;
    default:  // TRAILER
        if (byte == '\n') {
            if (!answer->trailer_has_text) on_whole(answer);
            answer->trailer_has_text = false;
        } else if (byte != '\r') {
            answer->trailer_has_text = true;
        }
    }
}

// Takes what has come. Bytes behind the end of the answer break it: nothing more was asked for.
static void answer_feed(struct answer *answer, const char *data, size_t bytes) {
    while (bytes && answer->state != BROKEN) {
        size_t taken = 1;
        switch (answer->state) {
        case HEAD:
            taken = take_head(answer, data, bytes);
            break;
        case DATA:
        case LENGTH:
            taken = bytes < answer->left ? bytes : (size_t)answer->left;
            on_body(answer, data, taken);
            answer->left -= taken;
            if (answer->left || answer->state == BROKEN) break;
            if (answer->state == DATA) answer->state = DATA_END;
            else on_whole(answer);
            break;
        case UNTIL_CLOSE:
            taken = bytes;
            on_body(answer, data, bytes);
            break;
        case WHOLE:
            answer->state = BROKEN;
            break;
        default:
            on_framing(answer, (unsigned char)*data);
        }
        data += taken, bytes -= taken;
    }
}

// The connection has ended. Says whether the answer was all there.
static bool answer_end(struct answer *answer) {
    if (answer->state == UNTIL_CLOSE) on_whole(answer);
    return answer->state == WHOLE;
}
