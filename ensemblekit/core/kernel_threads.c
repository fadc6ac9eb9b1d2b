/* Threads of compiled code. They are started when they are first needed, and sleep while there is no work. */

#include <pthread.h>
#include <signal.h>
#include <stddef.h>

#include "kernels.h"

enum { MAX_THREADS = 64, SPINS = 1000 };

#if defined(__x86_64__)
#define PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ volatile("yield")
#else
#define PAUSE() (void)0
#endif

static struct {
    pthread_mutex_t lock, in_use;
    pthread_cond_t wake, finished;
    const Job *job;
    int64_t next;           /* item that nobody has taken yet */
    int num_helpers, limit; /* threads that exist, and how many of them may work on this job */
    int num_working;        /* of these */
    int knows_forks;        /* whether `forget_threads` is registered */
} pool = {
    .lock = PTHREAD_MUTEX_INITIALIZER,
    .in_use = PTHREAD_MUTEX_INITIALIZER,
    .wake = PTHREAD_COND_INITIALIZER,
    .finished = PTHREAD_COND_INITIALIZER,
};

static void take_items(const Job *job, int64_t thread) {
    int64_t item;
    while ((item = __atomic_fetch_add(&pool.next, 1, __ATOMIC_RELAXED)) < job->num_items)
        job->work(job->plan, item, job->scratch + thread * job->scratch_size);
}

static void *help(void *argument) {
    int64_t thread = (intptr_t)argument;
    pthread_mutex_lock(&pool.lock);
    for (;;) {
        const Job *job = pool.job;
        if (job && thread <= pool.limit && __atomic_load_n(&pool.next, __ATOMIC_RELAXED) < job->num_items) {
            __atomic_add_fetch(&pool.num_working, 1, __ATOMIC_RELAXED);
            pthread_mutex_unlock(&pool.lock);
            take_items(job, thread);
            pthread_mutex_lock(&pool.lock);
            if (__atomic_sub_fetch(&pool.num_working, 1, __ATOMIC_RELEASE) == 0)
                pthread_cond_signal(&pool.finished);
        }
        pthread_cond_wait(&pool.wake, &pool.lock);
    }
    return NULL;
}

static void forget_threads(void) { /* a forked process has none of them */
    pthread_mutex_init(&pool.lock, NULL);
    pthread_mutex_init(&pool.in_use, NULL);
    pthread_cond_init(&pool.wake, NULL);
    pthread_cond_init(&pool.finished, NULL);
    pool.job = NULL;
    pool.num_helpers = pool.num_working = 0;
}

static void start_helpers(int wanted) { /* with the lock */
    if (pool.num_helpers >= wanted)
        return;
    if (!pool.knows_forks)
        pool.knows_forks = pthread_atfork(NULL, NULL, forget_threads) == 0;
    sigset_t all, before; /* signals are for the threads of Python */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (pool.num_helpers < wanted) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, help, (void *)(intptr_t)(pool.num_helpers + 1)))
            break;
        pthread_detach(thread);
        pool.num_helpers++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

void run(const Job *job, int64_t num_threads) {
    if (num_threads <= 1 || pthread_mutex_trylock(&pool.in_use) != 0) { /* alone, or another thread has the helpers */
        for (int64_t item = 0; item < job->num_items; item++)
            job->work(job->plan, item, job->scratch);
        return;
    }
    pthread_mutex_lock(&pool.lock);
    pool.limit = (int)(num_threads < MAX_THREADS ? num_threads : MAX_THREADS) - 1;
    start_helpers(pool.limit);
    pool.job = job;
    pool.next = 0;
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.lock);
    take_items(job, 0);
    /* helpers finish what they have begun within microseconds, sooner than a thread that sleeps is woken up */
    for (int i = 0; i < SPINS && __atomic_load_n(&pool.num_working, __ATOMIC_ACQUIRE) > 0; i++)
        PAUSE();
    pthread_mutex_lock(&pool.lock);
    while (pool.num_working > 0)
        pthread_cond_wait(&pool.finished, &pool.lock);
    pool.job = NULL;
    pthread_mutex_unlock(&pool.lock);
    pthread_mutex_unlock(&pool.in_use);
}

#if defined(__x86_64__)
int64_t highest_version = 2;

void limit_version(int64_t highest) { highest_version = highest; } /* for tests */
#endif
