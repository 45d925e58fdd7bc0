-- release(worker, ttl, held × (id, fence)) -> how many requests were handed back
--
-- A worker that leaves hands back what it holds, free of charge, and is forgotten.
pass_maxmemory()
local worker, ttl = ARGV[1], tonumber(ARGV[2])
local FIRST, WIDTH = 3, 2

local released = 0

local function release_one(id, fence)
  local request = read_whole(id)
  if request.state ~= 'running' or request.fence ~= fence then return 0 end
  give_back(id, request, ttl)
  count('released')
  released = released + 1
  return 1
end

each(FIRST, WIDTH, (#ARGV - FIRST + 1) / WIDTH, release_one)
redis.call('ZREM', WORKERS, worker)
redis.call('DEL', worker_key(worker))
if redis.call('GET', SOLO) == worker then redis.call('DEL', SOLO) end
return released
