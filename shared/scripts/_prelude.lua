-- What all scripts share. The loader puts this text in front of each of them, and then, as far as the script needs them,
-- `_lives.lua`, `_endings.lua` and `_pushes.lua`: every call makes all their functions anew.
--
-- KEYS[1..12] are the same in every script. The keys of single requests are built from the queue's prefix: their ids come
-- out of lists and sets while the script runs, so nobody could declare them. The hash tag {queue} keeps all of them in one
-- cluster slot. Times are milliseconds of the broker's clock, the only clock there is.
local META, STATS, DEAD, HIGH, REQUESTS, LOW, RESUME, SUSPECTS, LEASES, DEADLINES, WORKERS, SOLO = unpack(KEYS, 1, 12)
local PREFIX = string.match(META, '^(.*)meta$')
local LISTS = { high = HIGH, normal = REQUESTS, low = LOW }

local LAYOUT = '2'
local FORGET_WORKER_AFTER = 3 -- leases without a heartbeat
local CRASHES_BEFORE_SUSPECT = 2
local CRASHES_ALONE_BEFORE_DEAD = 2
local POKE = '~'

local clock = redis.call('TIME')
local now_us = clock[1] * 1000000 + clock[2]
local now = math.floor(now_us / 1000)

-- Fields of a hash by name; a missing one is nil.
local function read_hash(key, ...)
  local values, fields = redis.call('HMGET', key, ...), {}
  for i, name in ipairs({ ... }) do fields[name] = values[i] or nil end
  return fields
end

-- The queue as this call has found it.
local meta = read_hash(META, 'layout', 'fence', 'turn', 'suspended', 'max_depth', 'max_queued_tokens', 'queued_tokens', 'husks')
if meta.layout and meta.layout ~= LAYOUT then
  return redis.error_reply('LAYOUT ' .. meta.layout .. ' ' .. LAYOUT)
end

local function request_key(id) return PREFIX .. 'request:' .. id end
local function reply_key(id) return PREFIX .. 'reply:' .. id end
local function tokens_key(id) return PREFIX .. 'tokens:' .. id end
local function own_key(worker) return PREFIX .. 'own:' .. worker end
local function worker_key(worker) return PREFIX .. 'worker:' .. worker end
local function idempotency_key(key) return PREFIX .. 'idem:' .. key end

-- A whole number as text: Lua alone would write a fence as 1.79e+15.
local function integer(number) return string.format('%.0f', number) end

local counts = {}

local function count(counter) counts[counter] = (counts[counter] or 0) + 1 end

-- The loader puts a call of this behind each script.
local function write_counts()
  for counter, n in pairs(counts) do redis.call('HINCRBY', STATS, counter, n) end
end

-- At maxmemory a script may not begin with a write that needs memory, but it may go on after one that needs none.
-- Whatever frees memory in the end (claim, finish, reclaim, ...) begins with this; enqueue does not.
local function pass_maxmemory() redis.call('DEL', PREFIX .. 'nothing') end

local function write_layout()
  if not meta.layout then redis.call('HSET', META, 'layout', LAYOUT) end
end

local function read(id, ...) return read_hash(request_key(id), ...) end

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

-- Idle workers block on the normal list alone: an element that is no request wakes them for what stands elsewhere. It is
-- pushed only where the list is empty, so there is one at most, at the head.
local function poke()
  if redis.call('LLEN', REQUESTS) == 0 then redis.call('RPUSH', REQUESTS, POKE) end
end

-- How many requests wait, begun before or not. Husks, whose requests have ended already, do not.
local function depth()
  local total = redis.call('LLEN', REQUESTS) - tonumber(meta.husks or 0)
  if redis.call('LINDEX', REQUESTS, 0) == POKE then total = total - 1 end
  if redis.call('EXISTS', HIGH, LOW, RESUME, SUSPECTS) > 0 then
    for _, list in ipairs({ HIGH, LOW, RESUME, SUSPECTS }) do total = total + redis.call('LLEN', list) end
  end
  return total
end

-- Why a request must not run any longer, or nil.
local function called_off(request)
  if request.cancelled then return 'cancelled' end
  if tonumber(request.due or math.huge) <= now then return 'deadline' end
end
