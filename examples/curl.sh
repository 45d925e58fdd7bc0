#!/bin/sh
# Generate through the HTTP gateway with curl:  tokenmill serve &  sh curl.sh
set -eu

url=${TOKENMILL_URL:-http://127.0.0.1:8080}

call() { # METHOD PATH [OPTIONS OF CURL]: the answer; where that is an error, it is printed and the script ends
    method=$1 path=$2
    shift 2
    curl -sS --no-buffer --fail-with-body -X "$method" "$url$path" "$@" \
        -H "Authorization: Bearer ${OPENAI_API_KEY:-none}" -H 'Content-Type: application/json'
    echo
}

# The API of OpenAI, whose own clients work here too.
call POST /v1/completions -d '{"model": "smollm2", "prompt": "The capital of France is", "max_tokens": 5,
    "temperature": 0}'

# A chat that is answered piece by piece, as server-sent events.
call POST /v1/chat/completions -d '{"model": "smollm2", "stream": true, "max_tokens": 12,
    "messages": [{"role": "user", "content": "Name three colours."}]}'

# A job is accepted at once and asked about later. Repeated with its key, it is the same job.
job=$(call POST /jobs -H "Idempotency-Key: curl-$$" -d '[
    {"prompt": "One plus one is", "max_tokens": 4},
    {"prompt": "Two plus two is", "max_tokens": 4},
    {"prompt": ""}]' | sed 's/^{"id":"\([^"]*\)".*/\1/')
call GET "/jobs/$job?wait=60"
call GET "/jobs/$job/events"
call DELETE "/jobs/$job" # ends what has not ended, and shows the rest
