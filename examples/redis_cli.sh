#!/bin/sh
# Answer prompts through a Tokenmill queue with redis-cli alone:  sh redis_cli.sh "The capital of France is" …
# All of them are on the queue before the first reply is awaited, so one worker runs them in one batch.
set -eu

url=${TOKENMILL_REDIS:-redis://127.0.0.1:6379/0}
queue="tm:{${TOKENMILL_QUEUE:-default}}"
batch="cli-$(date +%s)-$$"

submit() { # ID PROMPT: put one request on the queue; -x takes the JSON from stdin
    text=$(printf '%s' "$2" | sed 's/[\\"]/\\&/g')
    printf '{"id":"%s","prompt":"%s","max_tokens":16,"stop":"\\n"}' "$1" "$text" |
        redis-cli -u "$url" -x RPUSH "$queue:requests" >/dev/null
}

reply() { # ID: wait for the reply; it stays there for other readers until it expires
    json=$(redis-cli -u "$url" BLMOVE "$queue:reply:$1" "$queue:reply:$1" LEFT LEFT 60)
    [ -n "$json" ] || { echo "no reply to $1 in a minute: is a worker running?" >&2; exit 1; }
    printf '%s\n' "$json"
}

[ $# -gt 0 ] || { echo "usage: sh redis_cli.sh PROMPT…" >&2; exit 2; }
n=0
for prompt; do
    submit "$batch-$((n += 1))" "$prompt"
done
for i in $(seq "$n"); do
    reply "$batch-$i"
done
