-- What all scripts share; the loader puts this text in front of each of them.
--
-- KEYS[1..7] are the same in every script. The keys of single requests are built from the queue's prefix: their ids come
-- out of lists and sets while the script runs, so nobody could declare them. The hash tag {queue} keeps all of them in one
-- cluster slot. Times are milliseconds of the broker's clock, the only clock there is.
local META, STATS, DEAD, REQUESTS, RESUME, LEASES, WORKERS = unpack(KEYS, 1, 7)
local PREFIX = string.match(META, '^(.*)meta$')

local LAYOUT = '1'
local DEAD_LETTERS_KEPT = 1000
local DEAD_PAYLOAD_KEPT = 65536 -- bytes
local HASH_OUTLIVES_REPLY = 60000 -- so that a late reader learns "expired" instead of "never heard of it"
local FORGET_WORKER_AFTER = 3 -- leases without a heartbeat

local clock = redis.call('TIME')
local now_us = clock[1] * 1000000 + clock[2]
local now = math.floor(now_us / 1000)

local layout = redis.call('HGET', META, 'layout')
if layout and layout ~= LAYOUT then
  return redis.error_reply('LAYOUT ' .. layout .. ' ' .. LAYOUT)
end

local function request_key(id) return PREFIX .. 'request:' .. id end
local function reply_key(id) return PREFIX .. 'reply:' .. id end
local function tokens_key(id) return PREFIX .. 'tokens:' .. id end
local function own_key(worker) return PREFIX .. 'own:' .. worker end
local function worker_key(worker) return PREFIX .. 'worker:' .. worker end

-- A whole number as text: Lua alone would write a fence as 1.79e+15.
local function integer(number) return string.format('%.0f', number) end

local function count(counter) redis.call('HINCRBY', STATS, counter, 1) end

-- At maxmemory a script may not begin with a write that needs memory, but it may go on after one that needs none.
-- Whatever frees memory in the end (claim, finish, reclaim, ...) begins with this; enqueue does not.
local function pass_maxmemory() redis.call('DEL', PREFIX .. 'nothing') end

local function write_layout()
  if not layout then redis.call('HSET', META, 'layout', LAYOUT) end
end

-- Fields of a request by name; a missing one is nil.
local function read(id, ...)
  local values, fields = redis.call('HMGET', request_key(id), ...), {}
  for i, name in ipairs({ ... }) do fields[name] = values[i] or nil end
  return fields
end

-- Apply `handle` to each run of `width` arguments from ARGV[first] on; one that fails answers 0 and spares the others.
local function each(first, width, total, handle)
  local answers = {}
  for i = 1, total do
    local at = first + (i - 1) * width
    local ok, answer = pcall(handle, unpack(ARGV, at, at + width - 1))
    if not ok then count('script_errors') end
    answers[i] = ok and answer or 0
  end
  return answers
end

local function dead_letter(why, id, payload)
  payload = string.sub(payload, 1, DEAD_PAYLOAD_KEPT)
  redis.call('XADD', DEAD, 'MAXLEN', DEAD_LETTERS_KEPT, '*', 'why', why, 'id', id, 'payload', payload)
  count('dead_letters')
end

-- The only way to become finished: one reply, tokens ended or removed, the request cut down to what a repeat needs.
-- `request` holds its fence, sha1 and stream. Deleting first shrinks the hash for good, and clears whatever is in the way.
local function finish(id, request, reason, body, ttl)
  redis.call('DEL', reply_key(id), request_key(id))
  redis.call('RPUSH', reply_key(id), body)
  redis.call('PEXPIRE', reply_key(id), ttl)
  redis.call('HSET', request_key(id), 'state', reason, 'fence', request.fence or '0', 'sha1', request.sha1 or '')
  redis.call('PEXPIRE', request_key(id), ttl + HASH_OUTLIVES_REPLY)
  if request.stream then
    redis.call('XADD', tokens_key(id), '*', 'end', reason)
    redis.call('PEXPIRE', tokens_key(id), ttl)
  else
    redis.call('DEL', tokens_key(id))
  end
  count('finished_' .. reason)
end

-- End a request that cannot be served: a dead letter for the operator, an error reply for whoever waits.
local function refuse(id, payload, why, code, ttl)
  dead_letter(why, id, payload)
  local body = cjson.encode({
    id = id,
    finish_reason = 'error',
    text = '',
    usage = { prompt_tokens = 0, output_tokens = 0 },
    error = { code = code, message = why },
    deliveries = 0,
  })
  finish(id, {}, 'error', body, ttl)
end

-- Hand a running request back: the next claim goes on from its checkpoint, and the old fence opens nothing any more.
local function give_back(id, request)
  redis.call('ZREM', LEASES, id)
  redis.call('ZREM', own_key(request.worker), id)
  redis.call('HSET', request_key(id), 'state', 'waiting', 'fence', '0')
  redis.call('RPUSH', RESUME, id)
end
