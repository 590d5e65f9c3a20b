/* What NCCL and a tuner plugin tell each other: interfaces v3 to v6 (NCCL 2.21 to 2.32).
 *
 * NCCL opens the library in NCCL_TUNER_PLUGIN and takes the highest interface that both sides know. NCCL 2.27 knows up
 * to v4, 2.28 and 2.29 up to v5, 2.30 and later up to v6. Only what the plugin uses is declared here. The sizes of
 * structures that NCCL allocates do not matter, because the plugin only gets pointers to them.
 */
#ifndef DHELIX_TUNER_ABI_H
#define DHELIX_TUNER_ABI_H

#include <stddef.h>
#include <stdint.h>

enum { TUNER_SUCCESS = 0, TUNER_SYSTEM_ERROR = 2 }; /* of ncclResult_t */

/* ncclFunc_t. NCCL asks no tuner about sends and receives, so not about all-to-alls and permutes either. */
enum { BROADCAST, REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, FUNCTIONS };
enum { TREE, RING, COLLNET_DIRECT, COLLNET_CHAIN, NVLS, NVLS_TREE, PAT, ALGORITHMS };
enum { LL, LL128, SIMPLE, PROTOCOLS };

#define NOT_POSSIBLE (-1.0f) /* cost of an algorithm and protocol that the communicator cannot run */

/* Arguments: level (2: warning, 3: information), subsystems (0x40: tuning), file, line, format. */
typedef void (*tuner_log)(int level, unsigned long subsystems, const char *file, int line, const char *format, ...);

typedef int (*tuner_end)(void *context);
typedef int (*tuner_init_v3)(size_t ranks, size_t nodes, tuner_log log, void **context);
typedef int (*tuner_init_v5)(void **context, uint64_t communicator, size_t ranks, size_t nodes, tuner_log log,
                             void *domains, void *constants);

/* `bytes` is the larger of what a rank sends and what it receives. If several collectives of a group are alike and
 * their sizes are within a factor of 4, NCCL asks once, with the sum of their bytes. `costs` is an array of
 * float[algorithms][protocols]. Whatever has the least cost runs. */
typedef int (*tuner_ask_v3)(void *context, int function, size_t bytes, int pipelined, float **costs, int algorithms,
                            int protocols, int *channels);
typedef int (*tuner_ask_v4)(void *context, int function, size_t bytes, int pipelined, float **costs, int algorithms,
                            int protocols, int registered, int *channels);

/* `chunk` is in bytes. NCCL cuts it to what its buffers hold, and rounds it down to a multiple of the protocol's grain.
 * Less than one grain would stop the process. */
typedef int (*tuner_chunk_v6)(void *context, int function, size_t bytes, int algorithm, int protocol, int channels,
                              size_t *chunk);

typedef struct {
    const char *name;
    tuner_init_v3 init;
    tuner_ask_v3 ask;
    tuner_end end;
} tuner_v3;

typedef struct {
    const char *name;
    tuner_init_v3 init;
    tuner_ask_v4 ask;
    tuner_end end;
} tuner_v4;

typedef struct {
    const char *name;
    tuner_init_v5 init;
    tuner_ask_v4 ask;
    tuner_end end;
} tuner_v5;

typedef struct {
    const char *name;
    tuner_init_v5 init;
    tuner_ask_v4 ask;
    tuner_end end;
    tuner_chunk_v6 chunk;
} tuner_v6;

#endif
