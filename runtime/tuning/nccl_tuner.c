/* An NCCL tuner plugin that gives each collective of a program its own algorithm, protocol, channels and chunk size.
 *
 * NCCL says only type, size and communicator of a collective. Equal collectives of a program differ by their place in
 * the launch order. So the plugin holds, for each communicator of the program, the sequence of all its collectives in a
 * step, and follows it:
 *
 *     sequence                                  a communicator
 *     3 2 67108864 1 2 4 0                      3 times: an all-gather of 64 MiB, ring, Simple, 4 channels
 *     1 3 67108864 -1 -1 0 0                    then a reduce-scatter of 64 MiB, as NCCL has it
 *
 * A line is: repetitions, function, bytes, algorithm, protocol, channels, chunk. -1 and 0 leave the choice to NCCL.
 *
 * Which sequence is a communicator's, and where it is in it, follows from what NCCL has asked so far. If a question is
 * not the one that the sequence expects, the place is found again: the one before which the last questions agree
 * longest. Collectives of other programs are left to NCCL, unless they look like collectives of this one.
 *
 * All ranks of a communicator must choose alike, or they hang. They do: each choice depends on the table and on the
 * communicator's questions, and both are equal on all ranks. So the table may change only while no collective runs, and
 * at the same place of the program on all ranks.
 *
 * Python loads the library, too, and calls the functions at the end (plugin.py).
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tuner_abi.h"

#define EXPORTED __attribute__((visibility("default")))
#define REMEMBERED 64 /* questions of a communicator; a power of two */
#define NOWHERE ((size_t)-1)

typedef struct {
    int function;
    size_t bytes;
    int algorithm, protocol, channels;
    size_t chunk;
} Call;

typedef struct {
    Call *calls;
    size_t count;
} Sequence;

typedef struct {
    Sequence *sequences;
    size_t count;
    unsigned long number; /* of the table, to tell when a communicator's place is of another one */
} Table;

typedef struct {
    size_t ranks, nodes, number; /* number: communicators count from 0, in the order in which NCCL makes them */
    unsigned long table;
    size_t sequence, place; /* of the question that comes next; the sequence is NOWHERE if nothing is known */
    int functions[REMEMBERED];
    size_t sizes[REMEMBERED];
    size_t asked;           /* questions that are in the table, of which the last REMEMBERED are kept */
    size_t chunks[FUNCTIONS];
} Communicator;

typedef struct {
    size_t communicator, ranks, bytes;
    int function, matched;
} Question;

static pthread_rwlock_t lock = PTHREAD_RWLOCK_INITIALIZER; /* of the table: questions read it */
static Table table;
static pthread_mutex_t notes = PTHREAD_MUTEX_INITIALIZER; /* of everything below */
static unsigned long long communicators, asked, matched, applied, impossible;
static Question *questions;
static size_t question_count, question_room;

/* ---- The place of a communicator in its sequence ---- */

static int same(const Call *call, int function, size_t bytes) {
    return call->function == function && call->bytes == bytes;
}

/* How many of the communicator's last questions are those that end at `place`, in order. The last one counts. */
static size_t agreement(const Communicator *c, const Sequence *s, size_t place) {
    size_t kept = c->asked < REMEMBERED ? c->asked : REMEMBERED, n = 0;
    while (n < kept) {
        size_t at = (c->asked - 1 - n) & (REMEMBERED - 1);
        if (!same(&s->calls[place], c->functions[at], c->sizes[at])) break;
        place = (place ? place : s->count) - 1;
        n++;
    }
    return n;
}

static int occurs(int function, size_t bytes) {
    for (size_t s = 0; s < table.count; s++)
        for (size_t n = 0; n < table.sequences[s].count; n++)
            if (same(&table.sequences[s].calls[n], function, bytes)) return 1;
    return 0;
}

/* The call that the question stands for, or NULL. Moves the communicator to the next place. */
static const Call *follow(Communicator *c, int function, size_t bytes) {
    if (c->table != table.number) {
        c->table = table.number;
        c->sequence = NOWHERE;
        c->asked = 0;
    }
    int expected = c->sequence != NOWHERE && same(&table.sequences[c->sequence].calls[c->place], function, bytes);
    if (!expected && !occurs(function, bytes)) return NULL;
    size_t at = c->asked++ & (REMEMBERED - 1);
    c->functions[at] = function;
    c->sizes[at] = bytes;
    if (!expected) {
        size_t longest = 0;
        for (size_t s = 0; s < table.count; s++)
            for (size_t n = 0; n < table.sequences[s].count; n++) {
                size_t length = agreement(c, &table.sequences[s], n);
                if (length > longest) {
                    longest = length;
                    c->sequence = s;
                    c->place = n;
                }
            }
    }
    const Sequence *s = &table.sequences[c->sequence];
    const Call *found = &s->calls[c->place];
    c->place = (c->place + 1) % s->count;
    return found;
}

/* ---- What NCCL calls ---- */

static int begin(void **context, size_t ranks, size_t nodes) {
    Communicator *c = calloc(1, sizeof *c);
    if (!c) return TUNER_SYSTEM_ERROR;
    c->ranks = ranks;
    c->nodes = nodes;
    c->sequence = NOWHERE;
    pthread_mutex_lock(&notes);
    c->number = communicators++;
    pthread_mutex_unlock(&notes);
    *context = c;
    return TUNER_SUCCESS;
}

static void note(const Communicator *c, int function, size_t bytes, int is_matched, int is_applied, int is_impossible) {
    pthread_mutex_lock(&notes);
    asked++;
    matched += is_matched;
    applied += is_applied;
    impossible += is_impossible;
    if (question_count < question_room)
        questions[question_count++] = (Question){c->number, c->ranks, bytes, function, is_matched};
    pthread_mutex_unlock(&notes);
}

/* The algorithm that NCCL will choose by these costs: the least one that is not negative. -1 if there is none. */
static int cheapest(const float *costs, int algorithms, int protocols) {
    int least = -1;
    for (int n = 0; n < algorithms * protocols; n++)
        if (costs[n] >= 0.0f && (least < 0 || costs[n] < costs[least])) least = n;
    return least < 0 ? -1 : least / protocols;
}

/* Whether NCCL takes a tuner's channels as they are. It cuts those of rings and trees to what the communicator has. Of
 * collectives that the network reduces or multicasts it does not, and more channels than there are would be out of
 * bounds. The interface does not tell how many there are, so NCCL's own number stays. */
static int takes_channels_uncut(const Communicator *c, int algorithm) {
    return algorithm == COLLNET_DIRECT || algorithm == COLLNET_CHAIN || (algorithm == NVLS && c->nodes > 1);
}

static int ask(void *context, int function, size_t bytes, int pipelined, float **costs, int algorithms, int protocols,
               int registered, int *channels) {
    (void)pipelined, (void)registered;
    Communicator *c = context;
    if (!c || function < 0 || function >= FUNCTIONS) return TUNER_SUCCESS;
    pthread_rwlock_rdlock(&lock);
    const Call *found = table.count ? follow(c, function, bytes) : NULL;
    Call call = found ? *found : (Call){.algorithm = -1};
    pthread_rwlock_unlock(&lock);

    int is_possible = 1;
    if (call.algorithm >= 0) {
        float *cost = NULL;
        if (call.algorithm < algorithms && call.protocol < protocols)
            cost = &((float *)costs)[call.algorithm * protocols + call.protocol];
        is_possible = cost && *cost != NOT_POSSIBLE;
        if (is_possible) *cost = 0.0f;
    }
    if (call.channels && takes_channels_uncut(c, cheapest((float *)costs, algorithms, protocols))) call.channels = 0;
    if (call.channels && is_possible) *channels = call.channels;
    c->chunks[function] = is_possible ? call.chunk : 0;
    int is_set = call.algorithm >= 0 || call.channels || call.chunk;
    note(c, function, bytes, found != NULL, is_set && is_possible, !is_possible);
    return TUNER_SUCCESS;
}

static int chunk_size(void *context, int function, size_t bytes, int algorithm, int protocol, int channels,
                      size_t *chunk) {
    (void)bytes, (void)algorithm, (void)protocol, (void)channels;
    Communicator *c = context;
    if (c && function >= 0 && function < FUNCTIONS && c->chunks[function]) *chunk = c->chunks[function];
    return TUNER_SUCCESS;
}

static int end(void *context) {
    free(context);
    return TUNER_SUCCESS;
}

static int begin_v3(size_t ranks, size_t nodes, tuner_log log, void **context) {
    (void)log;
    return begin(context, ranks, nodes);
}

static int begin_v5(void **context, uint64_t communicator, size_t ranks, size_t nodes, tuner_log log, void *domains,
                    void *constants) {
    (void)communicator, (void)log, (void)domains, (void)constants;
    return begin(context, ranks, nodes);
}

static int ask_v3(void *context, int function, size_t bytes, int pipelined, float **costs, int algorithms,
                  int protocols, int *channels) {
    return ask(context, function, bytes, pipelined, costs, algorithms, protocols, 0, channels);
}

EXPORTED const tuner_v3 ncclTunerPlugin_v3 = {"dhelix", begin_v3, ask_v3, end};
EXPORTED const tuner_v4 ncclTunerPlugin_v4 = {"dhelix", begin_v3, ask, end};
EXPORTED const tuner_v5 ncclTunerPlugin_v5 = {"dhelix", begin_v5, ask, end};
EXPORTED const tuner_v6 ncclTunerPlugin_v6 = {"dhelix", begin_v5, ask, end, chunk_size};

/* ---- What Python calls ---- */

static void clear(Table *t) {
    for (size_t n = 0; n < t->count; n++) free(t->sequences[n].calls);
    free(t->sequences);
    *t = (Table){0};
}

static int is_admissible(const Call *call, size_t times) {
    int has_algorithm = call->algorithm >= 0;
    return times >= 1 && times <= 1u << 20 && call->function >= 0 && call->function < FUNCTIONS &&
           call->algorithm >= -1 && call->algorithm < ALGORITHMS && call->protocol >= -1 &&
           call->protocol < PROTOCOLS && has_algorithm == (call->protocol >= 0) && call->channels >= 0 &&
           call->channels <= 64;
}

/* Adds a line to a table. Returns whether this worked. */
static int add_line(Table *t, const char *line) {
    if (!strcmp(line, "sequence")) {
        Sequence *more = realloc(t->sequences, (t->count + 1) * sizeof *more);
        if (!more) return 0;
        t->sequences = more;
        t->sequences[t->count++] = (Sequence){0};
        return 1;
    }
    size_t times;
    Call call;
    int end_of_line = 0;
    if (!t->count || sscanf(line, "%zu %d %zu %d %d %d %zu%n", &times, &call.function, &call.bytes, &call.algorithm,
                            &call.protocol, &call.channels, &call.chunk, &end_of_line) != 7)
        return 0;
    if (line[end_of_line] || !is_admissible(&call, times)) return 0;
    Sequence *s = &t->sequences[t->count - 1];
    Call *more = realloc(s->calls, (s->count + times) * sizeof *more);
    if (!more) return 0;
    s->calls = more;
    while (times--) s->calls[s->count++] = call;
    return 1;
}

/* Replaces the table. Returns 0, or the number of the line that is wrong; the table then stays as it was. */
EXPORTED int dhelix_tuner_load(const char *text) {
    Table read = {0};
    int wrong = 0, number = 0;
    char *copy = strdup(text), *rest = NULL;
    if (!copy) return -1;
    for (char *line = strtok_r(copy, "\n", &rest); line && !wrong; line = strtok_r(NULL, "\n", &rest)) {
        number++;
        if (!add_line(&read, line)) wrong = number;
    }
    free(copy);
    for (size_t n = 0; n < read.count && !wrong; n++)
        if (!read.sequences[n].count) wrong = number;
    if (wrong) {
        clear(&read);
        return wrong;
    }
    pthread_rwlock_wrlock(&lock);
    read.number = table.number + 1;
    Table old = table;
    table = read;
    pthread_rwlock_unlock(&lock);
    clear(&old);
    return 0;
}

/* Communicators that NCCL made with this plugin; its questions; those in the table; those that were given a setting;
 * those whose algorithm and protocol the communicator cannot run. */
EXPORTED void dhelix_tuner_counts(unsigned long long counts[5]) {
    pthread_mutex_lock(&notes);
    memcpy(counts, (unsigned long long[]){communicators, asked, matched, applied, impossible}, 5 * sizeof *counts);
    pthread_mutex_unlock(&notes);
}

/* From now on keeps the next `room` questions, and forgets those kept before. Returns 0 unless memory is lacking. */
EXPORTED int dhelix_tuner_record(size_t room) {
    pthread_mutex_lock(&notes);
    free(questions);
    questions = room ? malloc(room * sizeof *questions) : NULL;
    question_room = questions ? room : 0;
    question_count = 0;
    pthread_mutex_unlock(&notes);
    return room && !questions;
}

/* Copies up to `room` kept questions, and returns how many are kept. */
EXPORTED size_t dhelix_tuner_recorded(Question *found, size_t room) {
    pthread_mutex_lock(&notes);
    size_t count = question_count;
    if (found && count) memcpy(found, questions, (count < room ? count : room) * sizeof *found);
    pthread_mutex_unlock(&notes);
    return count;
}
